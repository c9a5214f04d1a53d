"use strict";
// What a reader can do with the page: see values under the pointer, turn curves on and off, highlight a row.
// Without this script the page shows the same pictures and tables.

const rows = (name) => [...document.querySelectorAll("[data-row]")].filter((e) => e.dataset.row === name);

// Highlight a row in all tables and pictures; null ends it.
function highlight(name) {
  for (const element of document.querySelectorAll("[data-row]")) {
    const same = element.dataset.row === name;
    element.classList.toggle("hit", name !== null && same);
    if (element.closest("svg.drawing")) element.classList.toggle("dim", name !== null && !same);
  }
}

let chosen = null; // the row that a click keeps highlighted
for (const row of document.querySelectorAll("tr[data-row]")) {
  row.addEventListener("click", () => {
    chosen = chosen === row.dataset.row ? null : row.dataset.row;
    highlight(chosen);
  });
}

for (const figure of document.querySelectorAll("figure.chart")) {
  const values = document.createElement("div");
  values.className = "values";
  values.hidden = true;
  figure.append(values);

  for (const button of figure.querySelectorAll(".legend button")) {
    const name = button.dataset.row;
    button.addEventListener("click", () => {
      const on = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(on));
      for (const line of rows(name)) if (figure.contains(line) && line !== button) line.classList.toggle("off", !on);
    });
    for (const event of ["pointerenter", "focus"]) button.addEventListener(event, () => highlight(name));
    for (const event of ["pointerleave", "blur"]) button.addEventListener(event, () => highlight(chosen));
  }

  for (const drawing of figure.querySelectorAll("svg.drawing")) {
    for (const title of drawing.querySelectorAll("title")) title.remove(); // our own box has the values
    drawing.addEventListener("pointerleave", () => { values.hidden = true; });
    drawing.addEventListener("pointermove", (event) => {
      const box = drawing.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * drawing.viewBox.baseVal.width;
      const points = [...drawing.querySelectorAll(".curve:not(.off) .point")];
      if (!points.length) return;
      const distance = (point) => Math.abs(point.dataset.x - x);
      const nearest = points.reduce((a, b) => (distance(b) < distance(a) ? b : a));
      const here = points.filter((point) => point.dataset.x === nearest.dataset.x);
      values.replaceChildren(nearest.dataset.at);
      for (const point of here) {
        const curve = point.closest(".curve");
        const line = document.createElement("div");
        const name = document.createElement("span");
        const value = document.createElement("span");
        const swatches = [...figure.querySelectorAll(".legend button")];
        const swatch = swatches.find((e) => e.dataset.row === curve.dataset.row)?.querySelector("svg");
        name.textContent = curve.dataset.row;
        value.textContent = point.dataset.value;
        line.append(...(swatch ? [swatch.cloneNode(true)] : []), name, value);
        values.append(line);
      }
      values.hidden = false;
      const frame = figure.getBoundingClientRect();
      const left = event.clientX - frame.left + 14;
      const room = frame.width - values.offsetWidth;
      values.style.left = `${left <= room ? left : Math.max(0, left - values.offsetWidth - 28)}px`;
      values.style.top = `${event.clientY - frame.top + 14}px`;
    });
  }
}
