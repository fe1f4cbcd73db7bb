"use strict";
// Puts the page together: what is under the pointer, which operation is shown, and what the buttons do.

async function main() {
  const data = await readColumns(document.getElementById("data").textContent);
  const state = { mode: "sharing", moment: 0 };
  const trie = new Trie(data, state), timeline = new Timeline(data, state);
  const at = (id) => document.getElementById(id);
  const ops = data.opKind.length;

  function key() {
    const box = at("key");
    box.replaceChildren();
    const add = (colour, text) => {
      const item = document.createElement("span"), mark = document.createElement("i");
      mark.style.background = colour;
      item.append(mark, text);
      box.append(item);
    };
    const addRamp = (low, colours, high) => {
      const item = document.createElement("span"), mark = document.createElement("span");
      mark.className = "ramp";
      mark.style.background = `linear-gradient(to right, ${colours})`;
      item.append(low, mark, high);
      box.append(item);
    };
    if (state.mode === "sharing") addRamp("1 sequence", data.shareColours, number(data.mostSequences));
    if (state.mode === "reward") addRamp(`mean reward ${data.rewardLow.toPrecision(3)}`, data.rewardColours, data.rewardHigh.toPrecision(3));
    if (state.mode === "schedule") {
      for (const [name, text] of [["waiting", "not yet"], ["stack", "on the stack"], ["pushing", "pushed now"], ["running", "backward now"], ["done", "done"]]) add(STATES[name], text);
    }
    add(LOSS, "tokens with loss");
  }

  function setMode(mode) {
    state.mode = mode;
    document.querySelector(`input[name=colour][value=${mode}]`).checked = true;
    key();
    trie.drawing.again();
  }

  function setMoment(o, follow = true) {
    state.moment = clamp(Math.round(o), 0, ops - 1);
    at("moment").value = state.moment;
    at("operation").textContent = timeline.words(state.moment);
    at("now").textContent = `${number(state.moment + 1)} of ${number(ops)}`;
    if (follow && state.mode !== "schedule") setMode("schedule");
    trie.drawing.again();
    timeline.drawing.again();
  }

  // "rollout 3 (task 1, trial 2, reward 0)"
  function rolloutName(r) {
    const facts = ["task", "trial", "reward"].filter((name) => data[name]).map((name) => `${name} ${data[name][r]}`);
    return `rollout ${r}${facts.length ? ` (${facts.join(", ")})` : ""}`;
  }

  function facts(i) {
    const first = trie.start[i], last = first + data.runLength[i] - 1, deep = data.runDepth[i];
    let loss = 0;
    for (let k = data.lossOffset[i]; k < data.lossOffset[i + 1]; k++) loss += data.lossLength[k];
    const passing = number(data.runSequences[i]), many = data.runSequences[i] === 1 ? "sequence passes" : "sequences pass";
    const groups = [`of ${number(data.runRollouts[i])} rollout${data.runRollouts[i] === 1 ? "" : "s"}`];
    if (data.runTasks) groups.push(`${number(data.runTasks[i])} task${data.runTasks[i] === 1 ? "" : "s"}`);
    const lines = [`Tokens ${number(deep)} to ${number(deep + data.runLength[i] - 1)} (${number(data.runLength[i])}, ${number(loss)} with loss). ` +
      `${passing} ${many}, ${groups.join(" and ")}; ${number((data.runSequences[i] - 1) * data.runLength[i])} tokens saved.`];
    const from = after(data.sequenceTail, last - 1), to = after(data.sequenceTail, last);
    const ends = [];
    for (let s = from; s < Math.min(to, from + 3); s++) ends.push(`completion ${data.sequenceCompletion[s]} of ${rolloutName(data.sequenceRollout[s])}`);
    if (to > from) lines.push(`Ends here: ${ends.join("; ")}${to > from + 3 ? `; and ${to - from - 3} more` : ""}.`);
    const backs = new Set(), pushes = new Set();
    for (let p = data.pieceOffset[i]; p < data.pieceOffset[i + 1]; p++) {
      backs.add(data.pieceBack[p] + 1);
      if (data.piecePush[p] >= 0) pushes.add(data.piecePush[p] + 1);
    }
    const few = (set) => { const all = [...set].sort((a, b) => a - b); return all.slice(0, 4).join(", ") + (all.length > 4 ? ` … ${all[all.length - 1]}` : ""); };
    lines.push(`Runs backward in operation ${few(backs)}${pushes.size ? `; pushed in operation ${few(pushes)}` : "; never pushed"}.`);
    return lines.join(" ");
  }

  // Tokens around a row (or, without one, from the run's start), tokens with loss marked.
  function tokens(i, row, before, behind) {
    const first = trie.start[i], kept = trie.kept[i + 1] - trie.kept[i];
    if (row !== null && row - first >= kept) row = null; // not in this page: show how the run begins
    const from = row === null ? 0 : Math.max(0, row - first - before);
    const to = Math.min(kept, row === null ? behind : row - first + behind);
    const parts = document.createDocumentFragment();
    const note = (text) => { const span = document.createElement("span"); span.style.color = "#8a97a3"; span.textContent = text; parts.append(span); };
    if (from > 0) note("… ");
    for (let k = from; k < to; k++) {
      const id = data.token[trie.kept[i] + k], loss = trie.hasLoss(first + k, i);
      const element = document.createElement(loss ? "mark" : "span");
      element.textContent = data.texts ? data.texts[id] : data.ids[id] + " ";
      if (row === first + k) element.className = "at";
      parts.append(element);
    }
    if (to < data.runLength[i]) note(to < kept ? " …" : " … (longer than what this page holds)");
    return parts;
  }

  function show(found) {
    const run = found ? found.run : -1;
    if (run !== trie.hovered) trie.drawing.again();
    trie.hovered = run;
    if (trie.pinned >= 0 || !found) return;
    at("facts").textContent = facts(found.run);
    at("text").replaceChildren(tokens(found.run, found.row, 60, 160));
  }

  const canvas = trie.drawing.canvas;
  canvas.addEventListener("pointermove", (e) => show(trie.at(...trie.drawing.point(e))));
  canvas.addEventListener("pointerleave", () => show(null));
  canvas.addEventListener("click", (e) => {
    if (trie.view.dragged > 4) return;
    const found = trie.at(...trie.drawing.point(e));
    trie.pinned = found && found.run !== trie.pinned ? found.run : -1;
    if (trie.pinned >= 0) {
      at("facts").textContent = facts(found.run);
      at("text").replaceChildren(tokens(found.run, null, 0, 4000));
    }
    trie.drawing.again();
  });
  canvas.addEventListener("dblclick", (e) => {
    const found = trie.at(...trie.drawing.point(e));
    if (found) trie.zoomTo(found.run);
  });
  canvas.addEventListener("keydown", (e) => {
    if (e.key === "Escape") { trie.pinned = -1; trie.view.whole(); }
  });
  const middle = (factor) => trie.view.zoom(factor, (trie.view.x0 + trie.view.x1) / 2, (trie.view.y0 + trie.view.y1) / 2);
  at("closer").onclick = () => middle(0.6);
  at("wider").onclick = () => middle(1 / 0.6);
  at("whole").onclick = () => trie.view.whole();
  for (const input of document.querySelectorAll("input[name=colour]")) input.onchange = () => setMode(input.value);
  if (!data.runReward) at("by-reward").remove();

  at("moment").max = ops - 1;
  at("moment").oninput = (e) => setMoment(Number(e.target.value));
  at("before").onclick = () => setMoment(state.moment - 1);
  at("after").onclick = () => setMoment(state.moment + 1);
  at("all-ops").onclick = () => timeline.view.whole();
  const line = timeline.drawing.canvas;
  line.addEventListener("pointermove", (e) => { at("operation").textContent = timeline.words(timeline.at(timeline.drawing.point(e)[0])); });
  line.addEventListener("pointerleave", () => { at("operation").textContent = timeline.words(state.moment); });
  line.addEventListener("click", (e) => { if (timeline.view.dragged <= 4) setMoment(timeline.at(timeline.drawing.point(e)[0])); });

  let playing = false;
  at("play").onclick = () => {
    playing = !playing;
    at("play").textContent = playing ? "Stop" : "Play";
    if (playing && state.moment >= ops - 1) setMoment(0);
    let began = null, origin = state.moment;
    const step = (time) => {
      if (!playing) return;
      began ??= time;
      setMoment(origin + ((time - began) / 15000) * ops); // 15 s for the whole schedule
      if (state.moment >= ops - 1) { playing = false; at("play").textContent = "Play"; } else requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
  };

  key();
  setMoment(0, false);
  at("text").replaceChildren(tokens(0, null, 0, 300));
  document.body.dataset.ready = "yes";
  window.inspection = { data, trie, timeline, state };
}

main().catch((error) => {
  const box = document.getElementById("facts");
  box.className = "problem";
  box.textContent = `This page cannot be drawn here: ${error}`;
  document.body.dataset.ready = "no";
  throw error;
});
