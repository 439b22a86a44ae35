"use strict";
// Draws what the page knows (see explorer.py). Texts reach the page as text only, never as mark-up.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  if (!data.steps.length) return;
  const PARTS = ["prefill", "drafter's forwards", "rest of drafting", "target's forward", "rest of verification", "commit"];
  const [RUN] = data.policies;
  const [ROW, LETTER, GAP, LONGEST] = [22, 7.3, 62, 16];
  let [step, policy, layer, dense, timer] = [0, RUN, Infinity, null, 0];

  function make(parent, tag, attributes = {}, text = "") {
    const space = ["svg", "g", "path", "circle", "text", "tspan", "rect", "title"].includes(tag);
    const element = space ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text) element.textContent = text;
    parent.append(element);
    return element;
  }

  const tree = () => data.steps[step].trees[policy] ?? data.steps[step].trees[RUN];
  const label = (t, row) => data.labels[t.tokens[row]];
  const short = (text) => (text.length > LONGEST ? text.slice(0, LONGEST - 1) + "…" : text);
  const counted = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
  const nodes = (t) => t.probs.length - 1;

  function depthsOf(t) {
    const depths = [];
    t.parents.forEach((parent, row) => depths.push(row ? depths[parent] + 1 : 0));
    return depths;
  }

  function kindOf(t, row) {
    if (row === t.probs.length) return "own";
    if (row === 0) return "root";
    return t.path?.includes(row) ? "drafted" : "missed";
  }

  // Where rows stand: with labels one line a leaf; as an overview whatever fits, and discs alone.
  function places(t, depths, plain, width) {
    const lines = Math.max(...t.lines) + 1;
    const deepest = Math.max(...depths);
    if (plain) {
      const row = Math.max(3, Math.min(14, 460 / lines));
      const column = Math.min(90, (width - 40) / Math.max(1, deepest));
      const xs = depths.map((depth) => 16 + depth * column);
      return { xs, ys: t.lines.map((line) => row * (line + 0.5) + 8), ends: xs, width, height: row * lines + 16, row };
    }
    const widths = Array(deepest + 1).fill(0);
    depths.forEach((depth, row) => (widths[depth] = Math.max(widths[depth], short(label(t, row)).length)));
    const left = [12];
    widths.forEach((letters) => left.push(left[left.length - 1] + LETTER * letters + GAP));
    const xs = depths.map((depth) => left[depth]);
    const ends = xs.map((x, row) => x + 12 + LETTER * short(label(t, row)).length + (row && row < t.probs.length ? 28 : 0));
    return { xs, ys: t.lines.map((line) => ROW * (line + 0.5)), ends, width: left[deepest + 1], height: ROW * lines, row: ROW };
  }

  function drawTree() {
    const [box, t] = [at("tree"), tree()];
    const depths = depthsOf(t);
    const wide = box.clientWidth - 2;
    const full = places(t, depths, false, wide);
    const plain = dense ?? (full.height > 700 || full.width > 2.2 * wide);
    const place = plain ? places(t, depths, true, wide) : full;
    box.replaceChildren();
    const svg = make(box, "svg", { width: place.width, height: place.height, role: "img" });
    const deepest = deepestOf(t);
    const later = (row) => (row === t.probs.length ? layer < deepest : depths[row] > layer);
    const hidden = (row) => (later(row) ? " later" : "");
    for (let row = 1; row < t.tokens.length; row++) {
      const above = t.parents[row];
      const [x0, y0, x1, y1] = [place.ends[above], place.ys[above], place.xs[row], place.ys[row]];
      const bend = (x0 + x1) / 2;
      make(svg, "path", { class: kindOf(t, row) + hidden(row), d: `M${x0} ${y0}C${bend} ${y0} ${bend} ${y1} ${x1} ${y1}` });
    }
    t.tokens.forEach((_, row) => {
      const kind = kindOf(t, row);
      const prob = kind === "drafted" || kind === "missed" ? t.probs[row] : 0.5;
      const group = make(svg, "g", { class: kind + hidden(row), "data-row": row });
      make(group, "title", {}, tell(t, row));
      const most = plain ? Math.min(5, Math.max(2.5, place.row / 2)) : 5;
      const faint = kind === "missed" ? 0.35 + 0.65 * prob : 1;
      make(group, "circle", { cx: place.xs[row], cy: place.ys[row], r: 1.5 + most * Math.sqrt(prob), "fill-opacity": faint });
      if (!plain) {
        const text = make(group, "text", { x: place.xs[row] + 9, y: place.ys[row] + 4 }, short(label(t, row)));
        if (row && kind !== "own") make(text, "tspan", { class: "prob", dx: 5 }, prob.toFixed(2));
      }
    });
    at("view").textContent = plain ? "labels" : "overview";
    at("view").onclick = () => ((dense = !plain), drawTree());
    const grown = depths.filter((depth, row) => row && row < t.probs.length && depth <= layer).length;
    const expected = t.probs.reduce((sum, prob, row) => sum + (row && depths[row] <= layer ? prob : 0), 0);
    at("layer").textContent = deepest
      ? `layer ${Math.min(layer, deepest)} of ${deepest}: ${grown} of ${counted(nodes(t), "node")}, E(A) so far ${expected.toFixed(2)}`
      : "nothing was drafted in this step";
    at("less").disabled = Math.min(layer, deepest) <= 0;
    at("more").disabled = layer >= deepest;
    at("grow").disabled = !deepest;
    choose(null);
  }

  const deepestOf = (t) => Math.max(...depthsOf({ parents: t.parents.slice(0, t.probs.length) }));

  function rowsTo(t, row) {
    const rows = [];
    for (let one = row; one > 0; one = t.parents[one]) rows.unshift(one);
    return rows;
  }

  function tell(t, row) {
    const text = rowsTo(t, row).map((one) => label(t, one)).join(" ");
    const left = t === data.steps[step].trees[RUN] ? data.steps[step].left?.[row] : undefined;
    const leaves = left === undefined ? "" : `; the target leaves the tree here with ${left.toPrecision(3)}`;
    if (row === 0) return `${label(t, 0)}: the root, the last token of the context${leaves}`;
    if (row === t.probs.length) return `${text}: ends in the target's own token`;
    const [prob, above] = [t.probs[row], t.probs[t.parents[row]]];
    const share = above > 0 ? `, ${(prob / above).toFixed(3)} after its parent` : "";
    return `${text}: path probability ${prob.toPrecision(3)}${share}${t.path?.includes(row) ? ", accepted" : ""}${leaves}`;
  }

  function choose(row) {
    const t = tree();
    at("tree").querySelectorAll("g").forEach((g) => g.classList.toggle("chosen", Number(g.dataset.row) === row));
    if (row !== null) return (at("node").textContent = tell(t, row));
    const path = t.path?.slice(1).map((one) => label(t, one)).join(" ");
    const own = t.tokens.length > t.probs.length ? `; the target's own: ${label(t, t.probs.length)}` : "";
    at("node").textContent = t.path ? `accepted: ${path || "nothing"}${own}` : "what would have been accepted is not known";
  }

  function drawLengths() {
    const box = at("lengths");
    const [width, height, count] = [box.clientWidth, 110, data.steps.length];
    const own = data.steps.map((one) => one.trees[RUN]);
    const most = Math.max(1, ...own.map((t) => Math.max(t.path.length - 1, t.expected)));
    const [slot, scale] = [Math.min(40, (width - 24) / count), (height - 14) / most];
    box.replaceChildren();
    const svg = make(box, "svg", { width, height, role: "img", "aria-label": "E(A) against A by step" });
    make(svg, "rect", { class: "here", x: 24 + step * slot, y: 0, width: Math.max(slot, 2), height });
    own.forEach((t, index) => {
      const [x, accepted] = [24 + index * slot, t.path.length - 1];
      make(svg, "rect", { class: "a", x: x + slot * 0.15, y: height - accepted * scale - 1, width: slot * 0.7, height: accepted * scale + 1 });
      make(svg, "rect", { class: "e", x, y: height - t.expected * scale - 1.5, width: Math.max(slot, 2), height: 3 });
    });
    make(svg, "text", { x: 0, y: 12 }, String(Math.round(most)));
    make(svg, "text", { x: 0, y: height - 2 }, "0");
    svg.onclick = (event) => go(Math.floor((event.clientX - svg.getBoundingClientRect().left - 24) / slot));
  }

  function drawTimes() {
    const box = at("times");
    box.replaceChildren();
    const here = [0, ...data.steps[step].times];
    const all = [data.prefill, ...here.slice(1).map((_, part) => data.steps.reduce((sum, one) => sum + one.times[part], 0))];
    for (const [name, parts] of [["this step", here], ["all steps and the prefill", all]]) {
      const total = parts.reduce((sum, part) => sum + part, 0);
      make(box, "div", { class: "legend" }, `${name}: ${total.toFixed(1)} ms`);
      const bar = make(box, "div", { class: "share" });
      parts.forEach((part, index) => {
        if (!total || !part) return;
        const piece = make(bar, "div", { class: `part${index}` });
        piece.style.width = `${(100 * part) / total}%`;
        piece.title = `${PARTS[index]}: ${part.toFixed(2)} ms`;
      });
    }
    const table = make(box, "table");
    const head = make(table, "tr");
    ["ms", "this step", "all", "share"].forEach((text) => make(head, "td", {}, text));
    const total = all.reduce((sum, part) => sum + part, 0) || 1;
    PARTS.forEach((name, index) => {
      const row = make(table, "tr");
      const first = make(row, "th");
      make(first, "span", { class: `key part${index}` });
      first.append(" " + name);
      make(row, "td", {}, index ? here[index].toFixed(2) : "");
      make(row, "td", {}, all[index].toFixed(1));
      make(row, "td", {}, `${((100 * all[index]) / total).toFixed(0)} %`);
    });
  }

  function draw() {
    const [one, t] = [data.steps[step], tree()];
    at("step").max = data.steps.length - 1;
    at("step").value = step;
    at("back").disabled = step === 0;
    at("next").disabled = step === data.steps.length - 1;
    const own = one.trees[RUN];
    const most = one.ceiling === undefined ? "" : `, at most ${one.ceiling.toFixed(2)} by a verifier that is exact given the tree`;
    const emitted = one.kept < own.path.length ? `${one.kept} of ${own.path.length}` : one.kept;
    at("said").textContent =
      `step ${step + 1} of ${data.steps.length}: A ${own.path.length - 1}, E(A) ${own.expected.toFixed(2)}, ` +
      `${counted(emitted, "token")} emitted${most}, ${one.times.reduce((sum, part) => sum + part, 0).toFixed(1)} ms. ${one.policy}`;
    const bar = at("policies");
    bar.replaceChildren();
    data.policies.forEach((name, index) => {
      const its = one.trees[name];
      const figures = its ? `: ${counted(nodes(its), "node")}, E(A) ${its.expected.toFixed(2)}, A ${its.path ? its.path.length - 1 : "?"}` : ": not known here";
      const button = make(bar, "button", { title: `key: ${index + 1}` }, name + figures);
      button.disabled = !its;
      button.classList.toggle("here", its === t);
      button.onclick = () => show(name);
    });
    bar.hidden = data.policies.length === 1;
    document.querySelectorAll(".answer .step").forEach((span) => {
      const here = Number(span.dataset.step) === step;
      span.classList.toggle("here", here);
      if (here) span.parentElement.scrollTop = span.offsetTop - span.parentElement.clientHeight / 2;
    });
    drawTree();
    drawLengths();
    drawTimes();
  }

  function go(to) {
    stop();
    [step, layer] = [Math.max(0, Math.min(data.steps.length - 1, to)), Infinity];
    draw();
  }

  function show(name) {
    stop();
    if (!data.steps[step].trees[name]) return;
    [policy, layer] = [name, Infinity];
    draw();
  }

  function grown(to) {
    const deepest = deepestOf(tree());
    layer = Math.max(0, to);
    if (layer >= deepest) layer = Infinity;
    drawTree();
  }

  const now = () => Math.min(layer, deepestOf(tree()));
  const stop = () => clearInterval(timer);

  function grow() {
    stop();
    grown(0);
    timer = setInterval(() => (layer === Infinity ? stop() : grown(layer + 1)), 600);
  }

  at("back").onclick = () => go(step - 1);
  at("next").onclick = () => go(step + 1);
  at("step").oninput = (event) => go(Number(event.target.value));
  at("less").onclick = () => (stop(), grown(now() - 1));
  at("more").onclick = () => (stop(), grown(now() + 1));
  at("grow").onclick = grow;
  at("tree").onclick = (event) => {
    const group = event.target.closest("g");
    choose(group ? Number(group.dataset.row) : null);
  };
  document.querySelectorAll(".answer .step").forEach((span) => (span.onclick = () => go(Number(span.dataset.step))));
  const keys = {
    ArrowLeft: () => go(step - 1),
    ArrowRight: () => go(step + 1),
    ArrowDown: () => at("less").click(),
    ArrowUp: () => at("more").click(),
    g: grow,
    o: () => at("view").click(),
  };
  document.onkeydown = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const digit = data.policies[Number(event.key) - 1];
    const action = keys[event.key] ?? (digit && (() => show(digit)));
    if (!action) return;
    event.preventDefault();
    action();
  };
  window.onresize = draw;
  const known = data.steps.findIndex((one) => nodes(one.trees[RUN]) > 0);
  go(Math.max(known, 0));
})();
