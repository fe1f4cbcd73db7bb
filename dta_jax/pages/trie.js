"use strict";
// The prefix tree: blocks for runs, in preorder, so that a subtree that is out of sight is one jump.

const STATES = { waiting: "#e4e9ee", stack: "#57b8ab", pushing: "#0f766a", running: "#c8314a", done: "#9db8d4" };
const LOSS = "#f28e2b";

class Trie {
  constructor(data, state) {
    Object.assign(this, { data, state });
    const U = data.runLength.length;
    this.start = new Int32Array(U + 1);
    this.kept = new Int32Array(U + 1); // where each run's tokens begin in data.token
    this.top = new Int32Array(U + 1); // leaves before each run
    this.deepest = new Int32Array(U); // where the subtree's longest path ends
    for (let i = 0; i < U; i++) {
      this.start[i + 1] = this.start[i] + data.runLength[i];
      this.kept[i + 1] = this.kept[i] + Math.min(data.runLength[i], data.keptPerRun);
      this.top[i + 1] = this.top[i] + (data.runEnd[i] === i + 1 ? 1 : 0);
    }
    for (let i = U - 1; i >= 0; i--) {
      this.deepest[i] = Math.max(this.deepest[i], data.runDepth[i] + data.runLength[i]);
      if (data.runParent[i] >= 0) this.deepest[data.runParent[i]] = Math.max(this.deepest[data.runParent[i]], this.deepest[i]);
    }
    this.shares = ramp(data.shareColours);
    this.rewards = ramp(data.rewardColours);
    this.mostLog = Math.log(Math.max(2, data.mostSequences));
    this.drawing = new Drawing("trie", (...args) => this.draw(...args));
    const margin = { left: 0, right: 0, top: 0, bottom: 22 };
    this.view = new Window2D(this.drawing, Math.max(1, data.longest), Math.max(1, this.top[U]), margin, false);
    this.hovered = this.pinned = -1;
  }
  colour(i) {
    if (this.state.mode === "reward") {
      const low = this.data.rewardLow, span = this.data.rewardHigh - low;
      return this.rewards[Math.round(64 * clamp((this.data.runReward[i] - low) / span, 0, 1))];
    }
    return this.shares[Math.round((64 * Math.log(this.data.runSequences[i])) / this.mostLog)];
  }
  pieceColour(p) {
    const back = this.data.pieceBack[p], push = this.data.piecePush[p], now = this.state.moment;
    if (back < now) return STATES.done;
    if (back === now) return STATES.running;
    if (push === now) return STATES.pushing;
    return push >= 0 && push < now ? STATES.stack : STATES.waiting;
  }
  draw(context, width, height) {
    const { data, view } = this, U = data.runLength.length, bottomEdge = height - view.margin.bottom;
    const schedule = this.state.mode === "schedule";
    let drawn = 0, line = { x: 0, y: -9, to: -9 };
    context.save();
    context.beginPath();
    context.rect(0, 0, width, bottomEdge);
    context.clip();
    for (let i = 0; i < U; ) {
      const y = view.pixelY(this.top[i]), stop = view.pixelY(this.top[data.runEnd[i]]), high = stop - y;
      const x = view.pixelX(data.runDepth[i]);
      if (stop < 0 || y > bottomEdge || x > width || view.pixelX(this.deepest[i]) < 0) { i = data.runEnd[i]; continue; }
      if (high < 0.7) { // too thin to tell its branches apart: one line for the subtree, unless one is there
        const to = view.pixelX(this.deepest[i]);
        if (y > line.y + 0.5 || x < line.x || to > line.to) {
          context.fillStyle = schedule ? this.pieceColour(data.pieceOffset[i]) : this.colour(i);
          context.fillRect(x, y, Math.max(0.7, to - x), 0.7);
          line = { x, y, to };
          drawn++;
        }
        i = data.runEnd[i];
        continue;
      }
      drawn++;
      const tall = Math.min(stop, bottomEdge) - y - (high > 5 ? 1 : 0);
      this.block(context, i, x, y, tall, schedule);
      i++;
    }
    this.drawn = drawn;
    for (const i of [this.hovered, this.pinned]) if (i >= 0) this.outline(context, i, bottomEdge);
    context.restore();
    this.axis(context, width, bottomEdge);
  }
  block(context, i, x, y, tall, schedule) {
    const { data, view } = this, scale = view.scaleX(), first = this.start[i];
    const wide = Math.max(0.7, data.runLength[i] * scale - (data.runLength[i] * scale > 6 ? 0.7 : 0));
    if (!schedule) {
      context.fillStyle = this.colour(i);
      context.fillRect(x, y, wide, tall);
    } else {
      for (let p = data.pieceOffset[i]; p < data.pieceOffset[i + 1]; p++) {
        const from = data.pieceStart[p] - first;
        const to = p + 1 < data.pieceOffset[i + 1] ? data.pieceStart[p + 1] - first : data.runLength[i];
        context.fillStyle = this.pieceColour(p);
        context.fillRect(x + from * scale, y, Math.max(0.7, (to - from) * scale), tall);
      }
    }
    if (schedule && tall < 8) return; // what runs is more to see than where loss is
    const band = tall < 4 ? tall : clamp(tall * 0.3, 2, 10); // tokens with loss
    context.fillStyle = LOSS;
    for (let k = data.lossOffset[i]; k < data.lossOffset[i + 1]; k++) {
      const from = data.lossStart[k] - first;
      context.fillRect(x + from * scale, y + tall - band, Math.max(0.7, data.lossLength[k] * scale), band);
    }
  }
  outline(context, i, bottomEdge) {
    const { data, view } = this;
    const y = view.pixelY(this.top[i]), stop = Math.min(bottomEdge, view.pixelY(this.top[data.runEnd[i]]));
    context.strokeStyle = i === this.pinned ? "#c8314a" : "#22303c";
    context.lineWidth = 1.5;
    context.strokeRect(view.pixelX(data.runDepth[i]), y, Math.max(2, data.runLength[i] * view.scaleX()), Math.max(2, stop - y));
  }
  axis(context, width, y) {
    context.fillStyle = "#ffffff";
    context.fillRect(0, y, width, 40);
    context.font = "12px system-ui, DejaVu Sans, sans-serif";
    context.fillStyle = "#5b6b7a";
    const marks = ticks(this.view.x0, this.view.x1, 9);
    for (const depth of marks) {
      const x = this.view.pixelX(depth);
      context.fillRect(x, y, 1, 4);
      context.textAlign = x < 20 ? "left" : x > width - 60 ? "right" : "center";
      context.fillText(number(depth) + (depth === marks[marks.length - 1] ? " tokens deep" : ""), clamp(x, 2, width - 2), y + 17);
    }
  }
  // The run and row under a pixel, or null.
  at(px, py) {
    const { data } = this, depth = Math.floor(this.view.worldX(px)), leaf = Math.floor(this.view.worldY(py));
    if (py > this.drawing.size[1] - this.view.margin.bottom) return null;
    for (let i = 0; i < data.runLength.length; ) {
      if (this.top[data.runEnd[i]] <= leaf) { i = data.runEnd[i]; continue; }
      if (this.top[i] > leaf || data.runDepth[i] > depth) return null;
      if (depth < data.runDepth[i] + data.runLength[i]) return { run: i, row: this.start[i] + depth - data.runDepth[i] };
      i++;
    }
    return null;
  }
  zoomTo(i) {
    const from = this.data.runDepth[i], to = this.deepest[i], room = 0.03 * (to - from);
    const top = this.top[i], stop = this.top[this.data.runEnd[i]], more = Math.max(0, 6 - (stop - top)) / 2; // neighbours
    this.view.show(from - room, to + room, top - more, stop + more);
  }
  hasLoss(row, i) {
    const { data } = this, k = after(data.lossStart, row, data.lossOffset[i], data.lossOffset[i + 1]) - 1;
    return k >= data.lossOffset[i] && row < data.lossStart[k] + data.lossLength[k];
  }
}
