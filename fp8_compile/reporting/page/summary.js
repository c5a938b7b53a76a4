// The top of the page: what was rewritten, what was skipped and why, bytes; and the details of the chosen gemm.

function runsFor() {
  const modules = REPORT.modules || [];
  if (modules.length < 2) return [];
  const shown = modules.slice(0, 4).join(", ");
  return [["runs for", `${modules.length} modules: ${shown}${modules.length > 4 ? ", ..." : ""}`]];
}

function drawFacts() {
  const facts = [["recipe", REPORT.recipe], ["target", REPORT.target], ["graph", DATA.folder], ...runsFor(), ["fp8_compile", REPORT.version || ""]];
  for (const [name, value] of facts) if (value) document.getElementById("facts").append(element("span", { class: "fact" }, element("b", {}, name), ` ${value}`));
  document.title = `${DATA.folder}: ${REPORT.rewritten} of ${REPORT.matmuls} matmuls in FP8`;
}

function drawSummary(table) {
  const cards = [rewrittenCard(table), skippedCard(table), trafficCard(), savedCard(), troubleCard()];
  document.getElementById("summary").append(...cards.filter(Boolean));
}

function card(name, ...children) { return element("div", { class: "card" }, element("h2", {}, name), ...children); }

function rewrittenCard(table) {
  const skipped = REPORT.matmuls - REPORT.rewritten;
  const part = (count, kind) => element("button", { type: "button", class: `part ${kind}`, style: `flex-grow:${count}`, "aria-label": `Show ${count} ${kind}`, title: `${count} ${kind}`, onclick: () => table.filterBy(kind, "") });
  return card("Matmuls in FP8",
    element("p", { class: "big" }, String(REPORT.rewritten), element("small", {}, ` of ${REPORT.matmuls}`)),
    element("div", { class: "bar" }, REPORT.rewritten ? part(REPORT.rewritten, "rewritten") : null, skipped ? part(skipped, "skipped") : null),
    element("p", { class: "note" }, ["output", "grad_input", "grad_weight"].map((gemm) => `${gemm} ${ROWS.filter((row) => row.gemm === gemm && row.decision === "rewritten").length}`).join(" · ")));
}

function skippedCard(table) {
  const reasons = new Map();
  for (const row of ROWS) if (row.decision === "skipped") reasons.set(row.reason, (reasons.get(row.reason) || 0) + 1);
  const list = element("ul", { class: "reasons" });
  for (const [reason, count] of [...reasons].sort((a, b) => b[1] - a[1])) {
    list.append(element("li", {}, element("button", { type: "button", title: `Show these ${count}`, onclick: () => { table.filterBy("skipped", reason); document.getElementById("gemms").scrollIntoView({ block: "nearest" }); } }, element("b", {}, String(count)), ` ${shorten(reason, 140)}`)));
  }
  return card("Left in high precision", reasons.size ? list : element("p", { class: "note" }, "Nothing: every matmul runs in FP8."));
}

function trafficCard() {
  const traffic = REPORT.traffic;
  if (!traffic || !traffic.gemms_before) return null;
  const most = Math.max(traffic.gemms_before, traffic.after_apart);
  const line = (name, parts, text) => element("div", { class: "meter" }, element("span", {}, name), element("div", { class: "track" }, ...parts.map(([kind, bytes]) => element("i", { class: kind, style: `width:${(100 * bytes) / most}%` }))), element("b", {}, text));
  return card("Bytes through rewritten gemms",
    line("before", [["high", traffic.gemms_before]], formatBytes(traffic.gemms_before)),
    line("after", [["fp8", traffic.gemms_after], ["quantize", traffic.quantize_writes], ["maybe", traffic.quantize_reads]], `${formatBytes(traffic.after_fused)}–${formatBytes(traffic.after_apart)}`),
    element("p", { class: "note" }, `Estimated from tensor sizes: gemms alone ${formatBytes(traffic.gemms_before)} → ${formatBytes(traffic.gemms_after)}; making the operands writes ${formatBytes(traffic.quantize_writes)} and, where not fused, reads ${formatBytes(traffic.quantize_reads)}.${traffic.uncounted ? ` ${plural(traffic.uncounted, "gemm")} of unknown size not counted.` : ""}`));
}

function savedCard() {
  const saved = REPORT.saved_for_backward;
  if (!saved) return null;
  const less = saved.fp8_before - saved.fp8;
  return card("Kept for backward",
    element("p", { class: "big" }, formatBytes(saved.all)),
    element("div", { class: "bar" }, saved.fp8 ? element("span", { class: "part rewritten", style: `flex-grow:${saved.fp8}` }) : null, element("span", { class: "part skipped", style: `flex-grow:${Math.max(0, saved.all - saved.fp8)}` })),
    element("p", { class: "note" }, less > 0 ? `${formatBytes(less)} saved: ${formatBytes(saved.fp8)} of it are FP8 tensors that took ${formatBytes(saved.fp8_before)} in their own dtype.` : "No FP8 tensor is among them: FP8 operands are made again from what is kept anyway."));
}

function troubleCard() {
  if (!PASSES) return null;
  let worst = null, saturated = 0, elements = 0;
  const broken = [];
  PASSES.slots.forEach((name, slot) => {
    const over = sum(PASSES.overflow[slot]), all = sum(PASSES.elements[slot]);
    saturated += over; elements += all;
    if (PASSES.amax[slot].some((value) => typeof value === "string")) broken.push(slot);
    if (all && over && (!worst || over / all > worst.share)) worst = { slot, name, share: over / all, over, all };
  });
  const goTo = (slot) => element("button", { type: "button", class: "link", onclick: () => { choose({ slot }); document.getElementById("tensors").scrollIntoView({ block: "nearest" }); } }, shortenFront(PASSES.slots[slot], 44));
  const note = element("p", { class: "note" });
  if (broken.length) note.append(`Inf or NaN in ${plural(broken.length, "tensor")}, first in `, goTo(broken[0]));
  else if (worst) note.append("Most in ", goTo(worst.slot), ` (${formatShare(worst.over, worst.all)})`);
  else note.append("Nothing was saturated, and everything was finite.");
  return card("Saturated elements", element("p", { class: "big" }, formatShare(saturated, elements)), element("p", { class: "note" }, `${plural(PASSES.slots.length, "tensor")}, ${PASSES.axis} ${PASSES.label[0]} to ${PASSES.label[PASSES.label.length - 1]}`), note);
}

function sum(values) { return values.reduce((total, value) => total + (value || 0), 0); }

/** The chosen gemm, or node of the graph, with everything that is known of it. */
function drawDetails() {
  const host = document.getElementById("details"), { row, node } = CHOSEN;
  if (!row && !node) return host.replaceChildren(element("h3", {}, "No gemm chosen"), element("p", { class: "note" }, "Choose one in the table or click one in the graph: its code, shapes and scales are shown here."));
  const list = element("dl");
  const add = (name, ...values) => list.append(element("dt", {}, name), element("dd", {}, ...values));
  if (row) {
    add("decision", element("span", { class: `tag ${row.decision}` }, row.decision));
    add("reason", row.reason);
    add("gemm", `${row.gemm} (${row.op})`);
    add("shape", row.shapeText);
    if (row.formats.length) add("formats", row.formats.join(" × "));
    if (row.weight) add("weight", row.weight);
    if (row.bytes) add("bytes", `${formatBytes(row.bytes[0])} → ${formatBytes(row.bytes[1])} (estimate)`);
    add("code", row.code ? element("code", {}, row.code) : "unknown");
    for (const side of shapesOf(row)) add(side.title, ...side.lines.map((line) => element("div", {}, line)));
    if (row.slots.length) add("scales", ...row.slots.map(scaleLine));
  } else {
    const { stage, index } = node;
    add("operation", stage.target[index]);
    add("value", `${stage.precision[index]} ${stage.shape[index]}`);
    if (stage.bytes[index]) add("bytes", formatBytes(stage.bytes[index]));
    if (stage.module[index]) add("module", stage.module[index]);
    if (stage.phase[index]) add("runs in", stage.phase[index]);
    if (stage.slot[index]) add("scale", scaleLine(stage.slot[index]));
    if (stage.code[index]) add("code", element("code", {}, stage.code[index]));
  }
  const name = row ? row.where : title(node.stage, node.index);
  host.replaceChildren(element("h3", { title: name }, name), list);
}

/** Operands and result of a gemm before and after, as the graphs have them. */
function shapesOf(row) {
  const sides = [];
  for (const [id, kind] of [["before", null], ["rewritten", "fp8_matmul"]]) {
    const stage = STAGES.find((one) => one.id === id);
    if (!stage || (id === "rewritten" && row.decision !== "rewritten")) continue;
    const index = kind ? stage.site.findIndex((site, i) => site === row.node && stage.kind[i] === kind) : stage.name.indexOf(row.node);
    if (index < 0) continue;
    const value = (i) => `${stage.precision[i]} ${stage.shape[i]}`;
    sides.push({ title: id === "before" ? "before" : "after", lines: [...operands(stage, index).map((input) => value(input)), `→ ${value(index)}`] });
  }
  return sides;
}

/** Left and right: what addmm and baddbmm add comes before them, what an FP8 gemm adds behind its scales. */
function operands(stage, index) {
  const first = /^aten\.b?addb?mm/.test(stage.target[index]) ? 1 : 0;
  return stage.inputs[index].slice(first, first + 2);
}

function scaleLine(name) {
  const slot = PASSES ? PASSES.slots.indexOf(name) : -1;
  if (slot < 0) {
    const how = { delayed: "from the passes before; options={'stats': True} records it", tensorwise: "one, from the tensor itself", rowwise: "one a row", blockwise: "one a block of 128" }[REPORT.recipe] || "";
    return element("div", { class: "scale" }, element("b", {}, name), element("div", { class: "note" }, how));
  }
  const t = PASSES.label.length - 1;
  return element("div", { class: "scale" },
    element("button", { type: "button", class: "link", title: "Show its charts", onclick: () => { choose({ slot }); document.getElementById("tensors").scrollIntoView({ behavior: "smooth", block: "start" }); } }, name),
    element("div", { class: "note" }, `scale ${formatNumber(PASSES.scale[slot][t])}, amax ${formatNumber(PASSES.amax[slot][t])}, saturated ${formatShare(sum(PASSES.overflow[slot]), sum(PASSES.elements[slot]))}`));
}

function drawLegend() {
  const shown = ["fp8_matmul", "matmul", "quantize", "dequantize", "other", "input"];
  document.getElementById("graph-legend").replaceChildren(...shown.map((kind) => element("span", {}, element("i", { style: `background:var(--${kind}-fill);border-color:var(--${kind}-line)` }), KINDS[kind])));
}
