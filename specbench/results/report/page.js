"use strict";
// Copies a command; where the clipboard is closed to scripts, as on pages without https, it selects and copies.
for (const button of document.querySelectorAll("button.copy")) {
  button.hidden = false;
  button.addEventListener("click", async () => {
    const code = button.parentElement.querySelector("code");
    let copied = true;
    try { await navigator.clipboard.writeText(code.textContent); } catch {
      const range = document.createRange();
      range.selectNodeContents(code);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      copied = document.execCommand("copy");
    }
    button.textContent = copied ? "copied" : "selected";
    setTimeout(() => { button.textContent = "copy"; }, 2000);
  });
}

const text = cell => cell.textContent.trim();
// A number that a cell begins with ("1.08x", "x0.92", "0.66 ± 0.01"), or its text; nothing there sorts last.
function value(cell) {
  if (cell.dataset.sort) return Number(cell.dataset.sort);
  const found = text(cell).replaceAll(",", "").match(/^[x<]?([-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?)/i);
  return found ? Number(found[1]) : text(cell) === "-" ? null : text(cell).toLowerCase();
}
function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return typeof a === "number" ? -1 : typeof b === "number" ? 1 : a.localeCompare(b);
}
// "ngram gamma=3": rows that have the word somewhere and that value in that column.
function matches(row, term, headings) {
  const [name, wanted] = term.split("=", 2);
  const column = wanted === undefined ? -1 : headings.indexOf(name);
  return column < 0 ? row.textContent.toLowerCase().includes(term) : text(row.cells[column]).toLowerCase() === wanted;
}
for (const table of document.querySelectorAll("table.sorts")) {
  const body = table.tBodies[0], rows = [...body.rows], heads = [...table.tHead.rows[0].cells];
  const headings = heads.map(head => text(head).toLowerCase());
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.title = head.title ? `${head.title}; sorts the rows` : "sorts the rows";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const keyed = rows.map(row => [value(row.cells[column]), row]);
      keyed.sort(([a], [b]) => a === null || b === null ? (a === null) - (b === null) : compare(a, b) * (down ? -1 : 1));
      body.append(...keyed.map(([, row]) => row));
    });
  });
  if (rows.length <= 5) continue;
  const tools = document.createElement("div"), filter = document.createElement("input"), count = document.createElement("span");
  tools.className = "tools";
  filter.type = "search";
  filter.placeholder = `filter: words, or ${headings.find((name, at) => at > 0 && /^\w+$/.test(name)) ?? headings[0]}=...`;
  filter.setAttribute("aria-label", "filter the rows of the table");
  count.setAttribute("role", "status");
  const show = () => {
    const terms = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) row.hidden = !terms.every(term => matches(row, term, headings));
    count.textContent = `${rows.filter(row => !row.hidden).length} of ${rows.length} rows`;
  };
  filter.addEventListener("input", show);
  tools.append(filter, count);
  table.parentElement.before(tools);
  show();
}
