// Puts the parts together.

drawFacts();
const table = new Table();
drawSummary(table);
drawDetails();
onChoice((change) => { if ("row" in change) drawDetails(); });

const panes = [];
if (STAGES.length) {
  document.getElementById("graph").hidden = false;
  drawLegend();
  panes.push(new Pane(document.getElementById("pane-left"), "left", "before"));
  panes.push(new Pane(document.getElementById("pane-right"), "right", "rewritten"));
  document.getElementById("plumbing").addEventListener("change", () => panes.forEach((pane) => pane.relayout()));
}

let heat = null;
if (PASSES) {
  document.getElementById("tensors").hidden = false;
  onChoice((change) => { if ("slot" in change) drawCharts(); });
  heat = new Heat();
}

document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !/^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName)) {
    event.preventDefault();
    document.getElementById("filter-text").focus();
  }
  if (event.key === "Escape") choose({ row: null, node: null });
});

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  currentTheme = null;
  panes.forEach((pane) => pane.draw());
  if (heat) heat.draw();
});

// After the frame that painted all of the above.
requestAnimationFrame(() => requestAnimationFrame(() => { performance.mark("fp8:painted"); document.documentElement.dataset.painted = "yes"; }));
