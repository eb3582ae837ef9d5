"use strict";
// A click on a heading sorts its table; a second click turns the order round.
function sort(heading) {
  const body = heading.closest("table").tBodies[0];
  const sign = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  const value = (row) => {
    const cell = row.cells[heading.cellIndex];
    return cell.dataset.key === undefined ? cell.textContent : Number(cell.dataset.key);
  };
  const compare = (a, b) => (typeof a === "number" ? a - b : a.localeCompare(b, undefined, { numeric: true }));
  const missing = (row) => row.cells[heading.cellIndex].dataset.key === ""; // comes last either way
  const rows = [...body.rows].sort((a, b) => missing(a) - missing(b) || sign * compare(value(a), value(b)));
  body.append(...rows);
  for (const other of heading.parentElement.cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
}

// While the pointer is on a submission, the marks of the others step back.
function point(section, name) {
  for (const mark of section.querySelectorAll(".mark"))
    mark.classList.toggle("dim", name !== undefined && mark.dataset.of !== name);
}

for (const button of document.querySelectorAll("th button"))
  button.addEventListener("click", () => sort(button.parentElement));
for (const section of document.querySelectorAll("section"))
  section.addEventListener("pointerover", (event) => point(section, event.target.closest("[data-of]")?.dataset.of));
