"use strict";
// The schedule: one bar per operation, as wide as its work, and the height of the stack below.

class Timeline {
  constructor(data, state) {
    Object.assign(this, { data, state });
    const O = data.opKind.length;
    this.x = new Float64Array(O + 1);
    for (let o = 0; o < O; o++) this.x[o + 1] = this.x[o] + data.opWidth[o] * (data.opKind[o] ? data.backWork : 1);
    this.highest = Math.max(1, data.stackSlots, data.opHeight.reduce((a, b) => Math.max(a, b), 0));
    this.drawing = new Drawing("timeline", (...args) => this.draw(...args));
    const margin = { left: 70, right: data.rowBytes ? 70 : 14, top: 8, bottom: 24 };
    this.view = new Window2D(this.drawing, Math.max(1, this.x[O]), 1, margin, true);
  }
  draw(context, width, height) {
    const { data, view } = this, O = data.opKind.length, right = width - view.margin.right;
    const lanes = [[52, 26, "#2a9d8f", "#bfe3de"], [8, 40, "#2f74b5", "#c3d8ec"]]; // PUSH, BACK: y, height, rows, padding
    const floor = height - view.margin.bottom, roof = 94, perRow = (floor - roof) / this.highest;
    context.save();
    context.beginPath();
    context.rect(view.margin.left, 0, right - view.margin.left, height);
    context.clip();
    const first = Math.max(0, after(this.x, view.x0) - 1), last = Math.min(O, after(this.x, view.x1));
    context.beginPath();
    context.moveTo(view.pixelX(this.x[first]), floor);
    for (let o = first; o < last; o++) {
      const x = view.pixelX(this.x[o]), wide = view.pixelX(this.x[o + 1]) - x, gap = wide > 3 ? 0.7 : 0;
      const [y, high, rows, padding] = lanes[data.opKind[o]];
      const filled = (wide * data.opRows[o]) / data.opWidth[o];
      context.fillStyle = padding;
      context.fillRect(x, y, Math.max(0.6, wide - gap), high);
      context.fillStyle = rows;
      context.fillRect(x, y, Math.max(0.6, filled - gap), high);
      const level = floor - data.opHeight[o] * perRow;
      context.lineTo(x, level);
      context.lineTo(x + wide, level);
    }
    context.lineTo(view.pixelX(this.x[last]), floor);
    context.closePath();
    context.fillStyle = "#cfe0d9";
    context.fill();
    context.strokeStyle = "#3f7f70";
    context.lineWidth = 1;
    context.stroke();
    const now = this.state.moment, x = view.pixelX(this.x[now]);
    context.fillStyle = "rgba(200, 49, 74, 0.25)";
    context.fillRect(x, 4, Math.max(2, view.pixelX(this.x[now + 1]) - x), floor - 4);
    context.fillStyle = "#c8314a";
    context.fillRect(x, 4, 1.5, floor - 4);
    context.restore();
    this.axes(context, width, right, floor, roof, perRow);
  }
  axes(context, width, right, floor, roof, perRow) {
    const { data, view } = this;
    context.font = "12px system-ui, DejaVu Sans, sans-serif";
    context.fillStyle = "#5b6b7a";
    context.textAlign = "right";
    context.fillText("BACK", 62, 33);
    context.fillText("PUSH", 62, 70);
    for (const rows of ticks(0, this.highest, 4)) {
      const y = floor - rows * perRow;
      context.fillStyle = "#5b6b7a";
      context.textAlign = "right";
      context.fillText(number(rows), 62, y + 4);
      if (data.rowBytes && rows) {
        context.textAlign = "left";
        context.fillText(bytesText(rows * data.rowBytes), right + 6, y + 4);
      }
      context.fillStyle = "rgba(90, 107, 122, 0.2)";
      context.fillRect(view.margin.left, y, right - view.margin.left, 1);
    }
    const y = floor - data.stackSlots * perRow;
    context.fillStyle = "#8a97a3";
    for (let x = view.margin.left; x < right; x += 10) context.fillRect(x, y, 5, 1);
    context.textAlign = "left";
    context.fillStyle = "#5b6b7a";
    context.fillText("rows on the stack; dashed: its slots", view.margin.left + 6, Math.max(roof - 2, y - 4));
    context.textAlign = "center";
    context.fillText("work done →", (view.margin.left + right) / 2, floor + 17);
  }
  at(px) {
    return clamp(after(this.x, this.view.worldX(px)) - 1, 0, this.data.opKind.length - 1);
  }
  words(o) {
    const { data } = this, back = data.opKind[o] === 1;
    const padding = data.opWidth[o] - data.opRows[o], held = data.opHeight[o];
    const bytes = data.rowBytes ? ` (${bytesText(held * data.rowBytes)} with cotangents)` : "";
    return `Operation ${number(o + 1)} of ${number(data.opKind.length)}: ${back ? "BACK" : "PUSH"} of ${number(data.opRows[o])} rows` +
      (padding ? ` and ${number(padding)} of padding` : "") + (back ? `, ${number(data.opEntries[o])} tokens with loss` : "") +
      `. Then ${number(held)} rows are on the stack${bytes}.`;
  }
}
