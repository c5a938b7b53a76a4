// One side of the graph: a canvas that draws only what is in view, and a strip beside it that shows the whole.

const LONG_EDGE = 8 * (NODE.height + NODE.gapY);
const GUTTER = 26, STRIP = 18, SMALLEST_ZOOM = 0.02, LARGEST_ZOOM = 2.5;

class Pane {
  constructor(host, side, stageId) {
    this.side = side;
    this.select = element("select", { "aria-label": `Stage on the ${side}`, onchange: () => this.show(this.select.value) });
    for (const stage of STAGES) this.select.append(element("option", { value: stage.id }, stage.title));
    this.count = element("span", { class: "readout" });
    const button = (text, label, act) => element("button", { type: "button", "aria-label": label, title: label, onclick: act }, text);
    const bar = element("div", { class: "pane-bar" }, this.select, this.count,
      button("−", "Zoom out", () => this.zoomBy(1 / 1.4)), button("+", "Zoom in", () => this.zoomBy(1.4)),
      button("⤢", "Fit the width", () => this.fit()));
    this.canvas = element("canvas", { tabindex: 0, role: "application" });
    this.box = element("div", { class: "pane-canvas" }, this.canvas);
    host.append(bar, this.box);
    this.layouts = new Map();
    this.view = { x: 0, y: 0, zoom: 1 };
    this.listen();
    this.show(STAGES.some((stage) => stage.id === stageId) ? stageId : STAGES[STAGES.length - 1].id);
  }

  show(id) {
    this.stage = STAGES.find((stage) => stage.id === id);
    this.select.value = id;
    this.relayout();
  }

  relayout() {
    const plumbing = document.getElementById("plumbing").checked;
    const key = `${this.stage.id} ${plumbing}`;
    if (!this.layouts.has(key)) this.layouts.set(key, layout(this.stage, plumbing));
    this.layout = this.layouts.get(key);
    this.gemms = this.layout.nodes.filter((node) => this.stage.site[node] && ROW_OF_SITE.has(this.stage.site[node]) && this.stage.kind[node].endsWith("matmul") || this.isOtherGemm(node));
    this.count.textContent = `${this.layout.nodes.length.toLocaleString("en")} of ${plural(this.stage.count, "node")}`;
    this.canvas.setAttribute("aria-label", `${this.stage.title}: graph with ${plural(this.gemms.length, "gemm")}. Arrow keys choose the previous or next one.`);
    this.fit();
    if (CHOSEN.row) this.reveal(CHOSEN.row.node);
  }

  /** A fused attention kernel is a row of the report, too, and its node keeps its name. */
  isOtherGemm(node) {
    const site = this.stage.site[node];
    return site && ROW_OF_SITE.has(site) && ROW_OF_SITE.get(site).decision === "skipped" && this.stage.kind[node] !== "view" && !this.stage.kind[node].endsWith("matmul");
  }

  size() { return { width: this.box.clientWidth, height: this.box.clientHeight }; }

  fit() {
    const { width } = this.size();
    const zoom = Math.min(1, Math.max(0.35, (width - GUTTER - STRIP - 24) / this.layout.width));
    this.view = { zoom, x: this.layout.width / 2 - (width + GUTTER - STRIP) / 2 / zoom, y: -16 / zoom };
    this.draw();
  }

  zoomBy(factor, at) {
    const { width, height } = this.size();
    const [px, py] = at || [width / 2, height / 2];
    const zoom = Math.min(LARGEST_ZOOM, Math.max(SMALLEST_ZOOM, this.view.zoom * factor));
    this.view.x += px / this.view.zoom - px / zoom;
    this.view.y += py / this.view.zoom - py / zoom;
    this.view.zoom = zoom;
    this.draw();
  }

  moveBy(dx, dy) {
    const { height } = this.size();
    this.view.x += dx / this.view.zoom;
    const margin = 40 / this.view.zoom;
    const most = Math.max(-margin, this.layout.height - height / this.view.zoom + margin);
    this.view.y = Math.min(most, Math.max(-margin, this.view.y + dy / this.view.zoom));
    this.draw();
  }

  /** Bring the gemm of a row into view. */
  reveal(site) {
    const node = this.gemms.find((one) => this.stage.site[one] === site);
    if (node !== undefined) {
      const { width, height } = this.size();
      if (this.view.zoom < 0.6) this.view.zoom = 0.8;
      this.view.x = this.layout.x[node] + NODE.width / 2 - (width + GUTTER - STRIP) / 2 / this.view.zoom;
      this.view.y = this.layout.y[node] + NODE.height / 2 - height / 2 / this.view.zoom;
    }
    this.draw();
  }

  nodeAt(px, py) {
    const x = px / this.view.zoom + this.view.x, y = py / this.view.zoom + this.view.y;
    const row = this.layout.rows[Math.floor(y / (NODE.height + NODE.gapY))] || [];
    return row.find((node) => x >= this.layout.x[node] && x <= this.layout.x[node] + NODE.width && y <= this.layout.y[node] + NODE.height);
  }

  chooseNode(node) {
    const row = ROW_OF_SITE.get(this.stage.site[node]) || null;
    this.hovered = node;
    choose({ row, node: { stage: this.stage, index: node } }, this);
    this.draw();
  }

  /** The next gemm in the graph's order, from the chosen one. */
  step(by) {
    if (!this.gemms.length) return;
    const now = CHOSEN.row ? this.gemms.findIndex((node) => this.stage.site[node] === CHOSEN.row.node) : -1;
    const next = Math.min(this.gemms.length - 1, Math.max(0, now + by));
    this.chooseNode(this.gemms[next]);
    this.reveal(this.stage.site[this.gemms[next]]);
  }

  listen() {
    const canvas = this.canvas;
    let from = null, moved = false;
    const at = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
    canvas.addEventListener("pointerdown", (event) => {
      from = at(event); moved = false;
      this.onStrip = from[0] > this.size().width - STRIP;
      canvas.setPointerCapture(event.pointerId);
      if (this.onStrip) this.jump(from[1]);
    });
    canvas.addEventListener("pointermove", (event) => {
      const [px, py] = at(event);
      if (!from) { canvas.style.cursor = this.nodeAt(px, py) !== undefined ? "pointer" : "grab"; return; }
      if (this.onStrip) return this.jump(py);
      if (moved || Math.hypot(px - from[0], py - from[1]) > 4) { moved = true; this.moveBy(from[0] - px, from[1] - py); from = [px, py]; }
    });
    canvas.addEventListener("pointerup", (event) => {
      const [px, py] = at(event);
      if (from && !moved && !this.onStrip) { const node = this.nodeAt(px, py); if (node !== undefined) this.chooseNode(node); }
      from = null;
    });
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      if (event.ctrlKey || event.metaKey) this.zoomBy(Math.exp(-event.deltaY / 300), at(event));
      else this.moveBy(event.shiftKey ? event.deltaY : event.deltaX, event.shiftKey ? 0 : event.deltaY);
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const moves = { ArrowUp: [0, -60], ArrowDown: [0, 60], ArrowLeft: [-60, 0], ArrowRight: [60, 0] };
      if (event.shiftKey && moves[event.key]) this.moveBy(...moves[event.key]);
      else if (event.key === "ArrowDown") this.step(1);
      else if (event.key === "ArrowUp") this.step(-1);
      else if (event.key === "PageDown") this.moveBy(0, this.size().height * 0.9);
      else if (event.key === "PageUp") this.moveBy(0, -this.size().height * 0.9);
      else if (event.key === "Home") { this.view.y = 0; this.draw(); }
      else if (event.key === "End") this.moveBy(0, 1e9);
      else if (event.key === "+" || event.key === "=") this.zoomBy(1.25);
      else if (event.key === "-") this.zoomBy(0.8);
      else if (event.key === "0") this.fit();
      else return;
      event.preventDefault();
    });
    new ResizeObserver(() => this.draw()).observe(this.box);
    onChoice((change, origin) => {
      if (!("row" in change)) return;
      if (origin !== this && change.row) this.reveal(change.row.node);
      else this.draw();
    });
  }

  jump(py) {
    const { height } = this.size();
    this.view.y = (py / height) * this.layout.height - height / 2 / this.view.zoom;
    this.moveBy(0, 0);
  }

  draw() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => { this.waiting = 0; this.paint(); });
  }

  paint() {
    const { width, height } = this.size();
    if (!width || !height) return;
    const context = sharpen(this.canvas, width, height);
    const look = theme();
    context.clearRect(0, 0, width, height);
    const { x, y, zoom } = this.view;
    const top = y - NODE.height, bottom = y + height / zoom;
    context.save();
    context.scale(zoom, zoom);
    context.translate(-x, -y);
    this.paintBands(context, look, x, width / zoom);
    this.paintEdges(context, look, top, bottom, zoom);
    const pitch = NODE.height + NODE.gapY;
    const first = Math.max(0, Math.floor(top / pitch)), last = Math.min(this.layout.rows.length - 1, Math.ceil(bottom / pitch));
    for (let i = first; i <= last; i++) for (const node of this.layout.rows[i]) this.paintNode(context, look, node, zoom);
    context.restore();
    this.paintGutter(context, look, height, top, bottom);
    this.paintStrip(context, look, width, height);
  }

  paintBands(context, look, left, width) {
    const pitch = NODE.height + NODE.gapY;
    this.layout.bands.forEach((band, index) => {
      if (index % 2) return;
      context.fillStyle = look.band;
      context.fillRect(left, band.from * pitch - NODE.gapY / 2, width, (band.to - band.from + 1) * pitch);
    });
  }

  paintEdges(context, look, top, bottom, zoom) {
    const chosen = CHOSEN.row ? CHOSEN.row.node : null;
    const far = zoom < 0.2;
    context.lineWidth = Math.max(1.1, 0.7 / zoom);
    // What forward keeps for backward runs past everything between: faint, or it would hide what is near.
    const faint = Math.max(0.07, Math.min(0.28, 300 / this.layout.edges.length));
    for (const style of ["long", "near", "chosen"]) {
      context.strokeStyle = style === "chosen" ? look.accent : look.edge;
      context.globalAlpha = style === "chosen" ? 1 : style === "long" ? faint : far ? 0.35 : 0.85;
      context.beginPath();
      for (const [from, to] of this.layout.edges) {
        const y0 = this.layout.y[from] + NODE.height, y1 = this.layout.y[to];
        if (Math.max(y0, y1) < top || Math.min(y0, y1) > bottom) continue;
        const touches = chosen !== null && (this.isChosen(from, chosen) || this.isChosen(to, chosen));
        if (style !== (touches ? "chosen" : y1 - y0 > LONG_EDGE ? "long" : "near")) continue;
        const x0 = this.layout.x[from] + NODE.width / 2, x1 = this.layout.x[to] + NODE.width / 2;
        context.moveTo(x0, y0);
        if (far) context.lineTo(x1, y1);
        else { const bend = Math.min(60, (y1 - y0) / 2 + 4); context.bezierCurveTo(x0, y0 + bend, x1, y1 - bend, x1, y1); }
      }
      context.stroke();
    }
    context.globalAlpha = 1;
  }

  isChosen(node, site) { return this.stage.site[node] === site; }

  paintNode(context, look, node, zoom) {
    const { stage } = this;
    const kind = stage.kind[node], x = this.layout.x[node], y = this.layout.y[node];
    const style = look.kinds[this.isOtherGemm(node) ? "matmul" : kind] || look.kinds.other;
    const chosen = CHOSEN.row && this.isChosen(node, CHOSEN.row.node);
    context.fillStyle = style.fill;
    context.strokeStyle = chosen ? look.accent : style.line;
    context.lineWidth = chosen ? Math.max(3, 2 / zoom) : kind.endsWith("matmul") ? 1.8 : 1.1;
    context.beginPath();
    context.roundRect(x, y, NODE.width, NODE.height, kind === "input" ? 17 : 6);
    context.fill();
    context.stroke();
    if (zoom < 0.32) return;
    context.fillStyle = style.text;
    context.font = `600 11.5px ${look.font}`;
    context.fillText(shorten(title(stage, node), 22), x + 10, y + 15);
    context.fillStyle = look.muted;
    context.font = `10.5px ${look.font}`;
    context.fillText(shorten(`${stage.precision[node]} ${stage.shape[node]}`.replace(/^- /, ""), 25), x + 10, y + 29);
  }

  paintGutter(context, look, height, top, bottom) {
    const { y, zoom } = this.view, pitch = NODE.height + NODE.gapY;
    context.fillStyle = look.panel;
    context.fillRect(0, 0, GUTTER, height);
    context.textAlign = "center";
    for (const band of this.layout.bands) {
      const from = Math.max(0, (band.from * pitch - NODE.gapY / 2 - y) * zoom);
      const to = Math.min(height, ((band.to + 1) * pitch - NODE.gapY / 2 - y) * zoom);
      if (to < 0 || from > height || to - from < 3) continue;
      context.fillStyle = band.backward ? look.backward : look.forward;
      context.fillRect(GUTTER - 4, from + 1, 3, to - from - 2);
      const text = `${band.label || "(root)"}${band.backward ? " · backward" : ""}`;
      const room = Math.floor((to - from - 10) / 6.2);
      if (room < 5) continue;
      context.save();
      context.translate(14, (from + to) / 2);
      context.rotate(-Math.PI / 2);
      context.fillStyle = look.muted;
      context.font = `10.5px ${look.font}`;
      context.fillText(shorten(text, room), 0, 0);
      context.restore();
    }
    context.textAlign = "left";
  }

  paintStrip(context, look, width, height) {
    const left = width - STRIP, scale = height / this.layout.height;
    context.fillStyle = look.panel;
    context.fillRect(left, 0, STRIP, height);
    for (const node of this.layout.nodes) {
      const kind = this.isOtherGemm(node) ? "matmul" : this.stage.kind[node];
      if (kind !== "matmul" && kind !== "fp8_matmul" && kind !== "quantize") continue;
      context.fillStyle = look.kinds[kind].line;
      context.globalAlpha = kind === "quantize" ? 0.45 : 1;
      context.fillRect(left + (kind === "quantize" ? 11 : 3), this.layout.y[node] * scale, kind === "quantize" ? 4 : 8, Math.max(1, Math.min(4, NODE.height * scale)));
    }
    context.globalAlpha = 1;
    const from = Math.max(0, this.view.y * scale), to = Math.min(height, (this.view.y + height / this.view.zoom) * scale);
    context.strokeStyle = look.accent;
    context.lineWidth = 1.5;
    context.strokeRect(left + 1, from + 1, STRIP - 2, Math.max(4, to - from - 2));
  }
}

function shorten(text, most) { return text.length <= most ? text : `${text.slice(0, most - 1)}…`; }

/** "q_proj · grad_weight" for a gemm, "rsqrt" for anything else. */
function title(stage, node) {
  const row = ROW_OF_SITE.get(stage.site[node]);
  const kind = stage.kind[node];
  if (row && kind.endsWith("matmul")) {
    const gemm = { output: "", grad_input: " · dX", grad_weight: " · dW" }[row.gemm];
    return (row.module ? row.module.split(".").pop() : stage.name[node]) + gemm;
  }
  if (kind === "input") return stage.module[node].split(".").slice(-2).join(".") || stage.name[node];
  return stage.target[node].replace(/^(aten|prims|fp8_compile|fp8_compile_cpu)\./, "").replace(/\.[A-Za-z_]+$/, "");
}

let currentTheme = null;
function theme() {
  if (currentTheme) return currentTheme;
  const kinds = {};
  for (const kind of Object.keys(KINDS)) kinds[kind] = { fill: colour(`${kind}-fill`), line: colour(`${kind}-line`), text: colour("text") };
  currentTheme = { kinds, font: colour("font"), edge: colour("edge"), accent: colour("accent"), muted: colour("muted"), band: colour("band"), panel: colour("panel"), forward: colour("forward"), backward: colour("backward") };
  return currentTheme;
}
