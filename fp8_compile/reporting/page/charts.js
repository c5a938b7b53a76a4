// Tensors over time: a heat strip of all of them, and charts of the chosen one.

const PASSES = DATA.passes;
const LABELS_WIDTH = 250;
const HAS_BLOCKS = Boolean(PASSES && PASSES.blocks && PASSES.blocks.some((row) => row.some((count) => count > 0)));
const METRICS = {
  overflow: { label: "saturated elements", score: (s, t) => shareScore(PASSES.overflow[s][t], PASSES.elements[s][t]), ends: ["none", "10 % or more"] },
  underflow: { label: "elements flushed to zero", score: (s, t) => shareScore(PASSES.underflow[s][t], PASSES.elements[s][t]), ends: ["none", "10 % or more"] },
  headroom: { label: "amax beyond what the scale holds", score: headroomScore, ends: ["fits", "4× beyond"] },
  ...(HAS_BLOCKS ? { ends: { label: "blocks at the scale's ends", score: (s, t) => shareScore(PASSES.at_ends[s][t], PASSES.blocks[s][t]), ends: ["none", "10 % or more"] } } : {}),
  sqnr: { label: "quantization noise", score: (s, t) => (typeof PASSES.sqnr[s][t] === "number" ? clamp01((40 - PASSES.sqnr[s][t]) / 35) : 0), ends: ["40 dB SQNR", "5 dB"] },
};

function clamp01(value) { return Math.min(1, Math.max(0, value)); }
/** 0 for none, then a step a factor of ten from one in ten million to one in ten. */
function shareScore(count, whole) { return count && whole ? clamp01((Math.log10(count / whole) + 7.5) / 6.5) : 0; }
/** The largest magnitude that the scale of a moment can hold. */
function limit(slot, t) { const scale = PASSES.scale[slot][t]; return typeof scale === "number" && scale > 0 ? PASSES.largest[slot] / scale : null; }
function headroomScore(slot, t) {
  const amax = PASSES.amax[slot][t], most = limit(slot, t);
  return typeof amax === "number" && amax > 0 && most ? clamp01(Math.log2(amax / most) / 2) : 0;
}
function isBroken(slot, t) { return typeof PASSES.amax[slot][t] === "string"; }

class Heat {
  constructor() {
    this.canvas = document.getElementById("heat");
    this.metric = document.getElementById("heat-metric");
    for (const [key, metric] of Object.entries(METRICS)) this.metric.append(element("option", { value: key }, metric.label));
    this.order = document.getElementById("heat-order");
    for (const select of [this.metric, this.order]) select.addEventListener("change", () => { this.arrange(); this.draw(); });
    this.canvas.addEventListener("click", (event) => { const slot = this.slotAt(event); if (slot !== undefined) choose({ slot }, this); });
    this.canvas.addEventListener("mousemove", (event) => this.tell(event));
    this.canvas.addEventListener("keydown", (event) => {
      const steps = { ArrowDown: 1, ArrowUp: -1, Home: -1e9, End: 1e9 };
      if (!steps[event.key]) return;
      const now = this.slots.indexOf(CHOSEN.slot);
      choose({ slot: this.slots[Math.min(this.slots.length - 1, Math.max(0, now + steps[event.key]))] }, this);
      event.preventDefault();
    });
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
    onChoice((change) => { if ("slot" in change) this.draw(); });
    this.arrange();
    choose({ slot: this.slots[0] }, this);
  }

  /** Tensors in order, each with how bad it ever was; whoever misbehaved is first. */
  arrange() {
    const { score } = METRICS[this.metric.value];
    this.scores = PASSES.slots.map((_, slot) => PASSES.label.map((_, t) => (isBroken(slot, t) ? 2 : score(slot, t))));
    const worst = this.scores.map((row) => Math.max(...row) + row.reduce((a, b) => a + b, 0) / row.length / 10);
    this.slots = PASSES.slots.map((_, slot) => slot);
    if (this.order.value === "worst") this.slots.sort((a, b) => worst[b] - worst[a] || a - b);
  }

  get rowHeight() { return this.slots.length <= 40 ? 16 : this.slots.length <= 120 ? 12 : 6; }

  draw() {
    const width = this.canvas.parentElement.clientWidth - 2;
    const tall = this.rowHeight, labels = tall >= 12 ? Math.min(LABELS_WIDTH, width * 0.45) : 4;
    const context = sharpen(this.canvas, width, this.slots.length * tall);
    const ramp = [0, 1, 2, 3, 4, 5].map((i) => colour(`heat-${i}`)), broken = colour("broken");
    const cell = (width - labels) / PASSES.label.length;
    this.at = { labels, cell, tall };
    context.font = `11px ${colour("font")}`;
    this.slots.forEach((slot, index) => {
      const y = index * tall, chosen = slot === CHOSEN.slot;
      if (chosen) { context.fillStyle = colour("chosen"); context.fillRect(0, y, labels, tall); }
      if (tall >= 12) {
        context.fillStyle = colour(chosen ? "text" : "muted");
        context.fillText(shortenFront(PASSES.slots[slot], Math.floor(labels / 6.1)), 4, y + tall - 4);
      }
      this.scores[slot].forEach((score, t) => {
        context.fillStyle = score > 1 ? broken : ramp[score > 0 ? Math.max(1, Math.ceil(score * 5)) : 0];
        context.fillRect(labels + t * cell, y + 0.5, Math.ceil(cell), tall - 1);
      });
      if (chosen) { context.strokeStyle = colour("accent"); context.lineWidth = 2; context.strokeRect(1, y + 1, width - 2, tall - 2); }
    });
    this.legend(ramp, broken);
    if (CHOSEN.slot !== null) this.canvas.setAttribute("aria-label", `All quantized tensors, time to the right. Chosen: ${PASSES.slots[CHOSEN.slot]}`);
  }

  legend(ramp, broken) {
    const [least, most] = METRICS[this.metric.value].ends;
    const swatch = (fill) => element("i", { style: `background:${fill}` });
    document.getElementById("heat-legend").replaceChildren(element("span", {}, least, ...ramp.map(swatch), most), element("span", {}, swatch(broken), "Inf or NaN"));
  }

  slotAt(event) { return this.slots[Math.floor(event.offsetY / this.at.tall)]; }

  tell(event) {
    const slot = this.slotAt(event), t = Math.floor((event.offsetX - this.at.labels) / this.at.cell);
    if (slot === undefined) return;
    const readout = document.getElementById("heat-readout");
    if (t < 0 || t >= PASSES.label.length) { readout.textContent = PASSES.slots[slot]; return; }
    const share = (count, whole) => formatShare(PASSES[count][slot][t], PASSES[whole][slot][t]);
    const ends = HAS_BLOCKS ? `, blocks at the scale's ends ${share("at_ends", "blocks")}` : "";
    readout.textContent = `${PASSES.slots[slot]}, ${PASSES.axis} ${PASSES.label[t]}: saturated ${share("overflow", "elements")}, flushed ${share("underflow", "elements")}${ends}`;
  }
}

/** The end of a name says more than its start. */
function shortenFront(text, most) { return text.length <= most ? text : `…${text.slice(text.length - most + 1)}`; }

const SVG = "http://www.w3.org/2000/svg";
function svg(tag, attributes, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Charts of one tensor: amax against what the scale holds, the scale, what was saturated or flushed, and the noise; of
    a format with a scale per block also which share of these is at an end. Without a scale that is known before the
    tensor there is nothing to hold the amax against. */
function drawCharts() {
  const host = document.getElementById("charts"), slot = CHOSEN.slot;
  if (slot === null) return;
  const number = (value) => (typeof value === "number" ? value : null);
  const at = PASSES.label.map((_, t) => t);
  const share = (field, of = "elements") => at.map((t) => (PASSES[of][slot][t] ? (100 * PASSES[field][slot][t]) / PASSES[of][slot][t] : null));
  const known = PASSES.scale[slot].some((value) => number(value) > 0);
  const blocks = HAS_BLOCKS && PASSES.blocks[slot].some((count) => count > 0);
  host.replaceChildren(
    element("h3", { title: PASSES.slots[slot] }, PASSES.slots[slot]),
    chart(known ? "amax, and the most that the scale holds" : "amax", true, [
      { name: "amax", values: PASSES.amax[slot].map(number), line: "c1" },
      ...(known ? [{ name: "most that fits", values: at.map((t) => limit(slot, t)), line: "c2", dashed: true }] : []),
    ], at.filter((t) => isBroken(slot, t))),
    ...(known ? [chart("scale", true, [{ name: "scale", values: PASSES.scale[slot].map((value) => number(value) || null), line: "c3" }])] : []),
    chart("saturated and flushed to zero, %", false, [
      { name: "saturated", values: share("overflow"), line: "c4", dashed: true },
      { name: "flushed", values: share("underflow"), line: "c1" },
    ]),
    ...(blocks ? [chart("blocks at the scale's ends, %", false, [{ name: "blocks", values: share("at_ends", "blocks"), line: "c2" }])] : []),
    chart("SQNR, dB", false, [{ name: "SQNR", values: PASSES.sqnr[slot].map(number), line: "c3" }]),
  );
}

function chart(name, logarithmic, series, broken = []) {
  const width = 520, height = 128, left = 58, right = 10, top = 10, bottom = 20;
  const values = series.flatMap((one) => one.values).filter((value) => value !== null && (!logarithmic || value > 0));
  const scale = logarithmic ? Math.log10 : (value) => value;
  let low = values.length ? Math.min(...values.map(scale)) : 0, high = values.length ? Math.max(...values.map(scale)) : 1;
  if (!logarithmic) { low = 0; high = high > 0 ? high : 1; }
  else if (high - low < 0.2) { low -= 0.15; high += 0.15; }
  const last = Math.max(1, PASSES.label.length - 1);
  const px = (t) => left + (t / last) * (width - left - right);
  const py = (value) => height - bottom - ((scale(value) - low) / (high - low)) * (height - top - bottom);
  const figure = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${name} over ${PASSES.label.length} moments` });
  for (const part of [0, 0.5, 1]) {
    const mark = low + part * (high - low), y = height - bottom - part * (height - top - bottom);
    figure.append(svg("line", { x1: left, x2: width - right, y1: y, y2: y, class: "grid" }), svg("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, formatNumber(logarithmic ? 10 ** mark : mark)));
  }
  for (const t of [0, Math.floor(last / 2), last]) {
    if (t < PASSES.label.length) figure.append(svg("text", { x: px(t), y: height - 4, "text-anchor": t === 0 ? "start" : t === last ? "end" : "middle" }, t === 0 ? `${PASSES.axis} ${PASSES.label[t]}` : String(PASSES.label[t])));
  }
  for (const t of broken) figure.append(svg("line", { x1: px(t), x2: px(t), y1: top, y2: height - bottom, class: "broken" }));
  for (const one of series) {
    let path = "", open = false;
    one.values.forEach((value, t) => {
      const known = value !== null && (!logarithmic || value > 0);
      if (known) path += `${open ? "L" : "M"}${px(t).toFixed(1)} ${py(value).toFixed(1)}`;
      open = known;
    });
    figure.append(svg("path", { d: path || "M0 0", class: `line ${one.line}${one.dashed ? " dashed" : ""}` }));
  }
  const cursor = svg("line", { y1: top, y2: height - bottom, class: "cursor", visibility: "hidden" });
  figure.append(cursor);
  const readout = element("span", { class: "readout" });
  const legend = () => readout.replaceChildren(...series.map((one) => element("span", { class: `key ${one.line}` }, one.name)));
  legend();
  figure.addEventListener("mousemove", (event) => {
    const box = figure.getBoundingClientRect();
    const t = Math.round((((event.clientX - box.left) / box.width) * width - left) / (width - left - right) * last);
    if (t < 0 || t >= PASSES.label.length) return;
    cursor.setAttribute("x1", px(t)); cursor.setAttribute("x2", px(t)); cursor.setAttribute("visibility", "visible");
    readout.replaceChildren(`${PASSES.axis} ${PASSES.label[t]} `, ...series.map((one) => element("span", { class: `key ${one.line}` }, `${one.name} ${formatNumber(one.values[t])}`)));
  });
  figure.addEventListener("mouseleave", () => { cursor.setAttribute("visibility", "hidden"); legend(); });
  return element("figure", {}, element("figcaption", {}, name, readout), figure);
}
