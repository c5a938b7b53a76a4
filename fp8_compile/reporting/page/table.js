// The table of gemms: filters, a sort, and only those rows in the document that can be seen.

const ROW_HEIGHT = 30, SPARE_ROWS = 12;
const COLUMNS = [
  { key: "where", label: "module", width: "minmax(180px, 2fr)" },
  { key: "gemm", label: "gemm", width: "104px" },
  { key: "volume", label: "shape M × N × K", width: "minmax(130px, 1fr)", text: (row) => row.shapeText },
  { key: "decision", label: "decision", width: "112px" },
  { key: "reason", label: "reason", width: "minmax(180px, 2fr)" },
  { key: "moved", label: "gemm bytes", width: "170px", hint: "estimate from tensor sizes" },
  { key: "code", label: "code", width: "minmax(160px, 2fr)", text: (row) => shortCode(row.code) },
];

class Table {
  constructor() {
    this.host = document.getElementById("table-scroll");
    this.sort = { key: "index", down: false };
    this.template = COLUMNS.map((column) => column.width).join(" ");
    this.head = element("div", { class: "row head", role: "row", style: `grid-template-columns:${this.template}` });
    for (const column of COLUMNS) {
      const button = element("button", { type: "button", title: column.hint || `Sort by ${column.label}`, onclick: () => this.sortBy(column.key) }, column.label);
      column.cell = element("div", { role: "columnheader", "aria-sort": "none" }, button);
      this.head.append(column.cell);
    }
    this.body = element("div", { class: "body", role: "rowgroup" });
    this.host.append(this.head, this.body);
    this.listen();
    this.refresh();
  }

  listen() {
    const fill = (id, all, values) => {
      const select = document.getElementById(id);
      select.append(element("option", { value: "" }, all));
      for (const [value, count] of values) select.append(element("option", { value }, `${shorten(value, 70)} (${count})`));
      select.addEventListener("change", () => this.refresh());
      return select;
    };
    const counts = (key) => {
      const found = new Map();
      for (const row of ROWS) found.set(row[key], (found.get(row[key]) || 0) + 1);
      return [...found].sort((a, b) => b[1] - a[1]);
    };
    this.decision = fill("filter-decision", "all", counts("decision"));
    this.gemm = fill("filter-gemm", "all", counts("gemm"));
    this.reason = fill("filter-reason", "all", counts("reason"));
    this.text = document.getElementById("filter-text");
    this.text.addEventListener("input", () => this.refresh());
    this.text.addEventListener("keydown", (event) => { if (event.key === "ArrowDown" || event.key === "Enter") { this.host.focus(); this.step(CHOSEN.row ? 0 : 1); event.preventDefault(); } });
    this.host.addEventListener("scroll", () => this.render());
    this.host.addEventListener("keydown", (event) => {
      const page = Math.max(1, Math.floor(this.host.clientHeight / ROW_HEIGHT) - 2);
      const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -1e9, End: 1e9 };
      if (event.target === this.host && steps[event.key]) { this.step(steps[event.key]); event.preventDefault(); }
    });
    new ResizeObserver(() => this.render()).observe(this.host);
    onChoice((change, origin) => {
      if (!("row" in change)) return;
      if (origin !== this && change.row) this.scrollTo(change.row);
      this.render();
    });
  }

  sortBy(key) {
    this.sort = { key, down: this.sort.key === key ? !this.sort.down : key === "volume" || key === "moved" };
    for (const column of COLUMNS) column.cell.setAttribute("aria-sort", column.key !== key ? "none" : this.sort.down ? "descending" : "ascending");
    this.refresh();
  }

  refresh() {
    const words = this.text.value.toLowerCase().replaceAll("×", "x").split(/\s+/).filter(Boolean);
    const wanted = (row) =>
      (!this.decision.value || row.decision === this.decision.value) &&
      (!this.gemm.value || row.gemm === this.gemm.value) &&
      (!this.reason.value || row.reason === this.reason.value) &&
      words.every((word) => haystack(row).includes(word));
    this.rows = ROWS.filter(wanted);
    const { key, down } = this.sort;
    const value = (row) => (key === "moved" ? (row.bytes ? row.bytes[0] : -1) : row[key]);
    const order = (a, b) => (typeof a === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
    this.rows.sort((a, b) => (down ? -1 : 1) * order(value(a), value(b)) || a.index - b.index);
    document.getElementById("filter-count").textContent =
      this.rows.length === ROWS.length ? plural(ROWS.length, "gemm") : `${this.rows.length.toLocaleString("en")} of ${plural(ROWS.length, "gemm")}`;
    this.host.style.height = `${Math.min(420, (ROWS.length + 1) * ROW_HEIGHT + 14)}px`;
    this.body.style.height = `${Math.max(1, this.rows.length) * ROW_HEIGHT}px`;
    this.host.setAttribute("aria-rowcount", this.rows.length);
    this.render();
  }

  filterBy(decision, reason) {
    this.decision.value = decision;
    this.reason.value = reason;
    this.refresh();
  }

  render() {
    const first = Math.max(0, Math.floor(this.host.scrollTop / ROW_HEIGHT) - SPARE_ROWS);
    const last = Math.min(this.rows.length, Math.ceil((this.host.scrollTop + this.host.clientHeight) / ROW_HEIGHT) + SPARE_ROWS);
    const made = [];
    for (let i = first; i < last; i++) made.push(this.rowElement(this.rows[i], i));
    if (!this.rows.length) made.push(element("div", { class: "nothing" }, "No gemm is like that. Loosen the filter."));
    this.body.replaceChildren(...made);
  }

  rowElement(row, index) {
    const chosen = CHOSEN.row === row;
    const made = element("div", {
      class: `row ${row.decision}${chosen ? " chosen" : ""}`, role: "row", "aria-selected": String(chosen), "aria-rowindex": index + 1,
      style: `grid-template-columns:${this.template};top:${index * ROW_HEIGHT}px`, onclick: () => { this.host.focus({ preventScroll: true }); choose({ row, node: null }, this); },
    });
    for (const column of COLUMNS) {
      const cell = element("div", { role: "gridcell", class: column.key });
      if (column.key === "decision") cell.append(element("span", { class: `tag ${row.decision}` }, row.decision));
      else if (column.key === "moved") cell.append(row.bytes ? `${formatBytes(row.bytes[0])} → ${formatBytes(row.bytes[1])}` : "");
      else { const text = column.text ? column.text(row) : row[column.key]; cell.append(shorten(text, 160)); cell.title = column.key === "code" ? row.code : text; }
      made.append(cell);
    }
    return made;
  }

  step(by) {
    if (!this.rows.length) return;
    const now = this.rows.indexOf(CHOSEN.row);
    const next = this.rows[Math.min(this.rows.length - 1, Math.max(0, now + by))];
    this.scrollTo(next);
    choose({ row: next, node: null }, this);
  }

  scrollTo(row) {
    const index = this.rows.indexOf(row);
    if (index < 0) return;
    const top = index * ROW_HEIGHT, room = this.host.clientHeight - ROW_HEIGHT;
    if (top < this.host.scrollTop) this.host.scrollTop = top;
    else if (top + ROW_HEIGHT > this.host.scrollTop + room) this.host.scrollTop = top + ROW_HEIGHT - room;
  }
}

function haystack(row) {
  row.haystack ||= [row.where, row.gemm, row.shape.join("x"), row.shapeText, row.decision, row.reason, row.op, row.weight, row.code, row.formats.join(" ")].join(" ").toLowerCase();
  return row.haystack;
}

/** "llama.py:42  return self.up(x)" of "/long/path/llama.py:42 return self.up(x)". */
function shortCode(code) {
  const match = /^(.*?)([^/\\]*:\d+) ?(.*)$/.exec(code);
  return match ? `${match[2]}  ${match[3]}` : code;
}
