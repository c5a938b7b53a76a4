"use strict";
// The data of the page, decoded once, and the few things that every part of it uses.
performance.mark("fp8:start");

const DATA = JSON.parse(document.getElementById("data").textContent);
const REPORT = DATA.report;

/** Stages with texts in place of indices into the table of strings. */
const STAGES = DATA.graphs.stages.map((stage) => {
  const strings = DATA.graphs.strings;
  const texts = ["name", "kind", "target", "precision", "shape", "module", "gemm", "phase", "site", "slot", "code"];
  const decoded = { id: stage.id, title: stage.title, bytes: stage.bytes, inputs: stage.inputs, count: stage.inputs.length };
  for (const field of texts) decoded[field] = stage[field].map((index) => strings[index]);
  return decoded;
});

const ROWS = REPORT.rows.map((row, index) => ({
  ...row,
  index,
  shapeText: row.shape.join(" × "),
  volume: row.shape.every((size) => typeof size === "number") ? row.shape.reduce((a, b) => a * b, 1) : -1,
  where: row.module || "(root)",
  bytes: (REPORT.traffic && REPORT.traffic.by_site[row.node]) || null,
  slots: (REPORT.slots && REPORT.slots[row.node]) || [],
}));
const ROW_OF_SITE = new Map(ROWS.filter((row) => row.node).map((row) => [row.node, row]));

/** What is chosen: one gemm, one tensor. Parts of the page listen and call choose(). */
const CHOSEN = { row: null, slot: null };
const listeners = [];
function onChoice(listener) { listeners.push(listener); }
function choose(change, origin) {
  Object.assign(CHOSEN, change);
  for (const listener of listeners) listener(change, origin);
}

/** An element; texts go in as text, never as markup, whatever a module is called. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function plural(count, word) { return `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`; }

function formatBytes(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (bytes >= 999.5 && unit < units.length - 1) { bytes /= 1000; unit++; }
  return `${unit === 0 || bytes >= 100 ? Math.round(bytes) : bytes.toPrecision(3)} ${units[unit]}`;
}

function formatNumber(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value === "inf" ? "∞" : value;
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

function formatShare(count, whole) {
  if (!whole) return "–";
  if (!count) return "0";
  const share = (100 * count) / whole;
  return share < 0.001 ? "<0.001 %" : `${Number(share.toPrecision(3))} %`;
}

/** A colour of the page's theme. */
function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim(); }

const KINDS = {
  fp8_matmul: "FP8 gemm", matmul: "gemm in high precision", quantize: "quantize", dequantize: "dequantize",
  other: "high precision", input: "input or weight", view: "view", output: "output",
};

/** A canvas as sharp as the screen; returns its 2D context, scaled to CSS pixels. */
function sharpen(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}
