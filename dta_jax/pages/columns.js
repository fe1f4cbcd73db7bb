"use strict";
// Reads the page's data: zlib of [header length u32 | header JSON | columns], base64.

const KINDS = { u1: Uint8Array, u2: Uint16Array, i4: Int32Array, f4: Float32Array };

async function readColumns(text) {
  const packed = Uint8Array.from(atob(text.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = await new Response(stream).arrayBuffer();
  const size = new DataView(bytes).getUint32(0, true);
  const data = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 4, size)));
  for (const [name, kind, offset, count] of data.columns) data[name] = new KINDS[kind](bytes, 4 + size + offset, count);
  return data;
}

// First index with values[index] > wanted, in values ascending.
function after(values, wanted, low = 0, high = values.length) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > wanted) high = middle;
    else low = middle + 1;
  }
  return low;
}

const number = (n) => Math.round(n).toLocaleString("en");
const clamp = (x, low, high) => Math.min(high, Math.max(low, x));

function bytesText(n) {
  return n >= 2 ** 29 ? `${(n / 2 ** 30).toFixed(1)} GiB` : `${(n / 2 ** 20).toFixed(0)} MiB`;
}

function ramp(stops) {
  const rgb = stops.map((s) => [1, 3, 5].map((i) => parseInt(s.slice(i, i + 2), 16)));
  return Array.from({ length: 65 }, (_, k) => {
    const at = (k / 64) * (stops.length - 1), i = Math.min(stops.length - 2, Math.floor(at));
    const mix = rgb[i].map((c, j) => Math.round(c + (at - i) * (rgb[i + 1][j] - c)));
    return `rgb(${mix})`;
  });
}

// A canvas that draws when it must, at the screen's resolution; `draw(context, width, height)`.
class Drawing {
  constructor(id, draw) {
    this.canvas = document.getElementById(id);
    this.draw = draw;
    this.waiting = false;
    this.size = [this.canvas.clientWidth, this.canvas.clientHeight]; // kept: asking the page is slow
    new ResizeObserver(() => this.again()).observe(this.canvas);
  }
  again() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      const scale = window.devicePixelRatio || 1;
      const [width, height] = (this.size = [this.canvas.clientWidth, this.canvas.clientHeight]);
      if (this.canvas.width !== Math.round(width * scale)) this.canvas.width = Math.round(width * scale);
      if (this.canvas.height !== Math.round(height * scale)) this.canvas.height = Math.round(height * scale);
      const context = this.canvas.getContext("2d");
      context.setTransform(scale, 0, 0, scale, 0, 0);
      context.clearRect(0, 0, width, height);
      this.draw(context, width, height);
    });
  }
  point(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }
}

// The part [x0, x1) x [y0, y1) of a world that a canvas shows; dragging and the wheel change it.
class Window2D {
  constructor(drawing, worldWidth, worldHeight, margin, fixedY) {
    Object.assign(this, { drawing, worldWidth, worldHeight, margin, fixedY });
    this.whole(false);
    const canvas = drawing.canvas;
    let last = null;
    canvas.addEventListener("pointerdown", (e) => { last = drawing.point(e); this.dragged = 0; canvas.setPointerCapture(e.pointerId); });
    canvas.addEventListener("pointerup", () => { last = null; });
    canvas.addEventListener("pointermove", (e) => {
      if (!last) return;
      const [x, y] = drawing.point(e);
      this.dragged += Math.abs(x - last[0]) + Math.abs(y - last[1]);
      this.move(-(x - last[0]) / this.scaleX(), -(y - last[1]) / this.scaleY());
      last = [x, y];
    });
    canvas.addEventListener("wheel", (e) => {
      if (!e.ctrlKey && document.activeElement !== canvas) return;
      e.preventDefault();
      const [x, y] = drawing.point(e);
      this.zoom(Math.exp(clamp(e.deltaY, -200, 200) * 0.003), this.worldX(x), this.worldY(y));
    }, { passive: false });
  }
  whole(redraw = true) { this.show(0, this.worldWidth, 0, this.worldHeight, redraw); }
  show(x0, x1, y0, y1, redraw = true) {
    const least = 1e-4;
    const wide = clamp(x1 - x0, Math.max(4, least * this.worldWidth), this.worldWidth);
    const high = this.fixedY ? this.worldHeight : clamp(y1 - y0, Math.max(0.5, least * this.worldHeight), this.worldHeight);
    this.x0 = clamp(x0, 0, this.worldWidth - wide);
    this.y0 = clamp(y0, 0, this.worldHeight - high);
    [this.x1, this.y1] = [this.x0 + wide, this.y0 + high];
    if (redraw) this.drawing.again();
  }
  move(dx, dy) { this.show(this.x0 + dx, this.x1 + dx, this.y0 + dy, this.y1 + dy); }
  zoom(factor, x, y) {
    this.show(x - (x - this.x0) * factor, x + (this.x1 - x) * factor, y - (y - this.y0) * factor, y + (this.y1 - y) * factor);
  }
  get width() { return this.drawing.size[0] - this.margin.left - this.margin.right; }
  get height() { return this.drawing.size[1] - this.margin.top - this.margin.bottom; }
  scaleX() { return this.width / (this.x1 - this.x0); }
  scaleY() { return this.height / (this.y1 - this.y0); }
  pixelX(x) { return this.margin.left + (x - this.x0) * this.scaleX(); }
  pixelY(y) { return this.margin.top + (y - this.y0) * this.scaleY(); }
  worldX(x) { return this.x0 + (x - this.margin.left) / this.scaleX(); }
  worldY(y) { return this.y0 + (y - this.margin.top) / this.scaleY(); }
}

// Round numbers between low and high, about `count`.
function ticks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const found = [];
  for (let x = Math.ceil(low / step) * step; x <= high; x += step) found.push(x);
  return found;
}
