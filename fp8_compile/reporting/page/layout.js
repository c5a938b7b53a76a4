// Where the nodes of a stage go: layers from top to bottom, weights right above the gemm that reads them.
//
// layer(n) = 1 + max(layer of inputs), and for what hangs on one input of the graph alone: right above its first reader.
// Within a layer: by the mean place of the neighbours, swept down and up a few times.

const NODE = { width: 148, height: 36, gapX: 14, gapY: 26 };
const SWEEPS = 4;
// The scaling state is read at the start, written at the end and touches every tensor: lines across everything.
const STATE_OPS = /next_scales|update_scales|record_amaxes|add_counts|aten\.copy_\./;

/** {nodes: indices, x, y, edges: [[from, to]], width, height, bands} of the nodes that are shown. */
function layout(stage, withPlumbing) {
  const shown = shownNodes(stage, withPlumbing);
  const inputs = visibleInputs(stage, shown);
  const nodes = [];
  for (let i = 0; i < stage.count; i++) if (shown[i]) nodes.push(i);
  const outputs = Array.from({ length: stage.count }, () => []);
  for (const node of nodes) for (const from of inputs[node]) outputs[from].push(node);
  const kept = nodes.filter((node) => inputs[node].length || outputs[node].length || stage.site[node]);
  const layer = layers(stage, kept, inputs, outputs);
  const rows = [];
  for (const node of kept) (rows[layer[node]] ||= []).push(node);
  const dense = rows.filter((row) => row && row.length);
  const x = places(dense, inputs, outputs, stage.count);
  const y = new Float64Array(stage.count);
  dense.forEach((row, index) => { for (const node of row) y[node] = index * (NODE.height + NODE.gapY); });
  let left = Infinity, right = -Infinity;
  for (const node of kept) { left = Math.min(left, x[node]); right = Math.max(right, x[node]); }
  for (const node of kept) x[node] -= left;
  const edges = [];
  for (const node of kept) for (const from of inputs[node]) edges.push([from, node]);
  return {
    nodes: kept, x, y, edges, rows: dense,
    width: kept.length ? right - left + NODE.width : NODE.width,
    height: Math.max(1, dense.length) * (NODE.height + NODE.gapY) - NODE.gapY,
    bands: bands(stage, dense),
  };
}

function shownNodes(stage, withPlumbing) {
  const shown = new Uint8Array(stage.count);
  for (let i = 0; i < stage.count; i++) {
    const kind = stage.kind[i];
    const gemm = kind === "matmul" || kind === "fp8_matmul" || kind === "quantize";
    const plumbing = kind === "view" || STATE_OPS.test(stage.target[i]) || (kind !== "input" && stage.bytes[i] <= 8 && stage.bytes[i] > 0);
    const state = kind === "input" && /^fp8_(forward|backward)_\d+_/.test(stage.name[i]);
    shown[i] = kind !== "output" && (withPlumbing || gemm || !(plumbing || state)) ? 1 : 0;
  }
  return shown;
}

/** For each node the shown ones that its value comes from, through those that are hidden. */
function visibleInputs(stage, shown) {
  const sources = new Array(stage.count);
  for (let i = 0; i < stage.count; i++) {
    const found = new Set();
    if (!STATE_OPS.test(stage.target[i]) || shown[i]) {
      for (const from of stage.inputs[i]) {
        if (shown[from]) found.add(from);
        else for (const one of sources[from]) { found.add(one); if (found.size > 12) break; }
      }
    }
    sources[i] = [...found];
  }
  return sources;
}

function layers(stage, nodes, inputs, outputs) {
  const layer = new Int32Array(stage.count);
  const origin = new Int32Array(stage.count).fill(-2); // the only input of the graph behind a node; -1: several
  // Gradients that depend on no forward value could stand at the top; a reader looks for them below.
  const backward = nodes.filter((node) => stage.phase[node] === "backward" && stage.kind[node] !== "input");
  const late = new Set(backward.length < nodes.length - backward.length * 0.05 ? backward : []);
  let base = -1;
  for (const node of [...nodes.filter((one) => !late.has(one)), ...backward.filter((one) => late.has(one))]) {
    if (!inputs[node].length) origin[node] = node;
    let deepest = late.has(node) ? base : -1;
    for (const from of inputs[node]) {
      deepest = Math.max(deepest, layer[from]);
      origin[node] = origin[node] === -2 || origin[node] === origin[from] ? origin[from] : -1;
    }
    layer[node] = deepest + 1;
    if (!late.has(node)) base = Math.max(base, layer[node]);
  }
  for (let i = nodes.length - 1; i >= 0; i--) {
    const node = nodes[i];
    if (origin[node] < 0 || !outputs[node].length || stage.kind[node].endsWith("matmul")) continue;
    let first = Infinity;
    for (const to of outputs[node]) first = Math.min(first, layer[to]);
    layer[node] = Math.max(layer[node], first - 1);
  }
  return layer;
}

function places(rows, inputs, outputs, count) {
  const step = NODE.width + NODE.gapX;
  const x = new Float64Array(count);
  for (const row of rows) row.forEach((node, index) => { x[node] = (index - (row.length - 1) / 2) * step; });
  for (let sweep = 0; sweep < SWEEPS; sweep++) {
    const down = sweep % 2 === 0;
    for (let i = 0; i < rows.length; i++) {
      const row = rows[down ? i : rows.length - 1 - i];
      const wanted = new Map();
      for (const node of row) {
        let near = down ? inputs[node] : outputs[node];
        if (!near.length) near = down ? outputs[node] : inputs[node];
        wanted.set(node, near.length ? near.reduce((sum, other) => sum + x[other], 0) / near.length : x[node]);
      }
      row.sort((a, b) => wanted.get(a) - wanted.get(b) || a - b);
      spread(row, wanted, x, step);
    }
  }
  return x;
}

/** As near to the wanted places as the order and the width of nodes allow. */
function spread(row, wanted, x, step) {
  const fromLeft = [], fromRight = [];
  row.forEach((node, i) => { fromLeft.push(i ? Math.max(wanted.get(node), fromLeft[i - 1] + step) : wanted.get(node)); });
  for (let i = row.length - 1; i >= 0; i--) {
    const place = wanted.get(row[i]);
    fromRight[i] = i === row.length - 1 ? place : Math.min(place, fromRight[i + 1] - step);
  }
  row.forEach((node, i) => { x[node] = (fromLeft[i] + fromRight[i]) / 2; });
}

/** Runs of layers that belong to one block of the model: [{label, backward, from, to}]. */
function bands(stage, rows) {
  const found = [];
  rows.forEach((row, index) => {
    const votes = new Map();
    let backward = 0, known = 0;
    for (const node of row) {
      if (stage.kind[node] === "input") continue;
      known++;
      backward += stage.phase[node] === "backward";
      const label = blockOf(stage.module[node]);
      if (label) votes.set(label, (votes.get(label) || 0) + 1);
    }
    const best = [...votes].sort((a, b) => b[1] - a[1])[0];
    const last = found[found.length - 1];
    const label = best ? best[0] : last ? last.label : "";
    const back = known ? backward > known / 2 : last ? last.backward : false;
    if (last && last.label === label && last.backward === back) last.to = index;
    else found.push({ label, backward: back, from: index, to: index });
  });
  return found;
}

/** "model.layers.3" of "model.layers.3.mlp.up_proj": up to the first number, or the first two names. */
function blockOf(module) {
  const match = /^(?:[^.]+\.)*?\d+(?=\.|$)/.exec(module);
  return match ? match[0] : module.split(".").slice(0, 2).join(".");
}
