"use strict";
// Says which values are under the pointer.

const charts = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");

function nearest(values, wanted) {
  let low = 0, high = values.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle + 1;
    else high = middle;
  }
  return low > 0 && wanted - values[low - 1] < values[low] - wanted ? low - 1 : low;
}

document.querySelectorAll(".chart svg").forEach((svg, k) => {
  const chart = charts[k];
  const make = (name) => svg.appendChild(document.createElementNS("http://www.w3.org/2000/svg", name));
  const cursor = make("line"), dots = chart.lines.map(() => make("circle"));
  cursor.setAttribute("stroke", "#8a97a3");
  const hide = () => { for (const shape of [cursor, ...dots]) shape.setAttribute("visibility", "hidden"); tip.style.display = "none"; };
  hide();
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * scale;
    if (x < chart.left - 4 || x > chart.right + 4) return hide();
    const wanted = chart.x0 + ((x - chart.left) / (chart.right - chart.left)) * (chart.x1 - chart.x0);
    const toX = (v) => chart.left + ((v - chart.x0) / (chart.x1 - chart.x0)) * (chart.right - chart.left);
    const toY = (v) => chart.floor - ((v - chart.y0) / (chart.y1 - chart.y0)) * (chart.floor - chart.top);
    let step = null;
    tip.replaceChildren(document.createElement("b"));
    chart.lines.forEach((line, j) => {
      const i = nearest(line.x, wanted), dot = dots[j];
      if (step === null || Math.abs(line.x[i] - wanted) < Math.abs(step - wanted)) step = line.x[i];
      const values = { cx: toX(line.x[i]), cy: toY(line.y[i]), r: 3.5, fill: line.colour, visibility: "visible" };
      for (const [name, value] of Object.entries(values)) dot.setAttribute(name, value);
      const row = document.createElement("div"), mark = document.createElement("i");
      mark.style.background = line.colour;
      row.append(mark, `${line.label}: ${Number(line.y[i].toPrecision(5)).toLocaleString("en", { maximumSignificantDigits: 5 })}`);
      tip.append(row);
    });
    tip.firstChild.textContent = `step ${Math.round(step).toLocaleString("en")}`;
    for (const [name, value] of Object.entries({ x1: toX(step), x2: toX(step), y1: chart.top, y2: chart.floor, visibility: "visible" })) cursor.setAttribute(name, value);
    tip.style.display = "block";
    tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${event.clientY + 14}px`;
  });
});
document.body.dataset.ready = "yes";
