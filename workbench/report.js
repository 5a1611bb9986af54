// What the timeline shows and how it is moved; report_draw.js paints it.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  data.runs = data.runs.map(unpackRun);
  const canvas = document.getElementById("timeline"), tip = document.getElementById("tip");
  const painter = timelinePainter(data, canvas);
  const { state, GUTTER, STRIP, colourOf, show, span, toTime, firstVisible } = painter;
  const MARKS = "The line above host work is plain while the device computes (hidden) and red while it is idle (exposed). "
    + "Whether hiding gained time is told by the step time, not by the line.";

  const bordered = data.runs.filter((run) => run.border);
  const list = (names) => names.join(", ").replace(/, ([^,]*)$/, " and $1");

  function borderCaption() {
    const loose = bordered.filter((run) => !run.border.isSteady).map((run) => run.name);
    const numbers = new Set(bordered.map((run) => run.border.finished));
    return "The border between two decode steps of each run. At the dashed line the device has sampled a forward's tokens; "
      + "the host then works for the next step. Does the device wait for it, or go on? "
      + "A forward has the number of the iteration that launches it; in async it is the iteration after that one which samples it. "
      + (numbers.size > 1 ? "The runs have no steady step of the same number. " : "")
      + (loose.length ? `No steady decode in ${list(loose)}: a border of the whole run is shown. ` : "")
      + bordered.map((run) => `In ${run.name} it is ${run.border.choice}. `).join("") + borderless();
  }

  function borderless() {
    return data.runs.filter((run) => !run.border).map((run) => `${run.name} has none: ${run.noBorder}. `).join("");
  }

  function steadyCaption() {
    const loose = data.runs.filter((run) => !run.isSteady && run.iterations.length).map((run) => run.name);
    const empty = data.runs.filter((run) => !run.iterations.length).map((run) => run.name);
    return (empty.length ? `No iterations were recorded in ${list(empty)}. ` : "")
      + (loose.length + empty.length < data.runs.length
      ? "A few decode iterations of each run, aligned where the first of them begins. " : "")
      + (loose.length ? `No steady decode in ${list(loose)}: the first iterations are shown. ` : "")
      + (bordered.length ? "" : `No border between two steps is shown: ${borderless()}`);
  }

  function present(id, caption) {
    state.atBorder = id === "border";
    for (const name of ["border", "steady", "whole"]) {
      document.getElementById(name).setAttribute("aria-pressed", String(name === id));
    }
    if (caption !== null) document.getElementById("caption").textContent = caption + MARKS;
  }

  // Host work after the border takes about a third of the width.
  function showBorder() {
    if (!bordered.length) { showSteady(); return; }
    data.runs.forEach((run) => { run.align = run.border ? run.border.at : run.steady; });
    const extent = Math.max(...bordered.map((run) => run.border.extent));
    present("border", borderCaption());
    show(-0.75 * extent, 2.25 * extent);
  }

  function showSteady() {
    data.runs.forEach((run) => { run.align = run.steady; });
    const most = Math.max(...data.runs.map((run) => run.viewLength));
    present("steady", steadyCaption());
    show(-0.02 * most, 1.02 * most);
  }

  function showWhole() {
    data.runs.forEach((run) => { run.align = 0; });
    const most = Math.max(1, ...data.runs.map((run) => Object.values(run.lanes).reduce((end, lane) => lane.start.reduce(
      (last, start, at) => Math.max(last, start + lane.length[at]), end),
      run.iterations.reduce((end, one) => Math.max(end, one.start + one.length), 0))));
    present("whole", "Every iteration of each run, from its first moment. ");
    show(-0.01 * most, 1.01 * most);
  }

  function alignAt(number) {
    const found = data.runs.map((run) => [run, run.iterations.find((each) => each.n === number)]).filter(([, one]) => one);
    const field = document.getElementById("align");
    field.setCustomValidity(found.length ? "" : `no run has iteration ${number}`);
    field.reportValidity();
    if (!found.length) return;
    for (const [run, one] of found) run.align = one.start;
    const length = state.atBorder || document.getElementById("whole").ariaPressed === "true"
      ? 2 * Math.max(...found.map(([, one]) => one.length)) : span();
    present("", `Aligned where iteration ${number} begins. `);
    show(-0.02 * length, 0.98 * length);
  }

  function zoom(factor, at) {
    show(at - (at - state.view.start) * factor, at + (state.view.end - at) * factor);
  }

  function pan(part) {
    const shift = part * span();
    show(state.view.start + shift, state.view.end + shift);
  }

  // The shortest span under the pointer, so that what is drawn on top is what is named.
  function hit(columns, time, slack) {
    let best = -1;
    for (let at = firstVisible(columns.start, columns.length, time - slack); at < columns.start.length; at++) {
      if (columns.start[at] > time + slack) break;
      if (columns.start[at] + columns.length[at] < time - slack) continue;
      if (best < 0 || columns.length[at] < columns.length[best]) best = at;
    }
    return best;
  }

  function lengthText(ns) {
    const [size, unit] = ns >= 1e9 ? [1e9, "s"] : ns >= 1e6 ? [1e6, "ms"] : ns >= 1e3 ? [1e3, "µs"] : [1, "ns"];
    return `${(ns / size).toLocaleString("en", { maximumSignificantDigits: 4 })} ${unit}`;
  }

  function waitInside(run, start, length) {
    const waits = run.lanes.wait;
    let total = 0;
    if (!waits) return total;
    for (let at = firstVisible(waits.start, waits.length, start); at < waits.start.length; at++) {
      if (waits.start[at] >= start + length) break;
      if (waits.start[at] >= start) total += waits.length[at];
    }
    return total;
  }

  function spanText(run, key, columns, at) {
    const iteration = columns.iteration[at], record = run.iterations.find((one) => one.n === iteration);
    const waited = key === "host" ? waitInside(run, columns.start[at], columns.length[at]) : 0;
    const lines = [`${run.names[columns.name[at]]}  (${key})`,
      lengthText(columns.length[at]) + (waited ? `, of which ${lengthText(waited)} waiting` : "")];
    lines.push(iteration < 0 ? "outside every iteration" : `iteration ${iteration}${record ? ", " + record.order : ""}`);
    if (columns.enqueued && columns.enqueued[at] !== null) {
      const delay = columns.start[at] - columns.enqueued[at];  // negative: it ran before the host came back
      lines.push(delay > 0 ? `began ${lengthText(delay)} after it was enqueued` : "began as it was enqueued");
    } else if (columns.phase[at] >= 0 && columns.phase[at] !== columns.name[at]) {
      lines.push(`in ${run.names[columns.phase[at]]}`);
    }
    if (columns.args && columns.args[at]) lines.push(columns.args[at]);
    return lines.join("\n");
  }

  // What ended a bubble, and what the host did before it had enqueued that.
  function idleText(run, at) {
    const { before, iteration, parts } = run.blame, length = run.bubbles.lengths[at], late = [];
    for (let place = 0; place < parts[at].length; place += 2) late.push([run.names[parts[at][place]], parts[at][place + 1]]);
    const whole = late.reduce((sum, [, time]) => sum + time, 0);
    const record = run.iterations.find((one) => one.n === iteration[at]);
    const lines = [`device idle for ${lengthText(length)}`,
      `before ${run.names[before[at]]} ${iteration[at]}${record ? `, ${record.order}` : ""}`];
    if (record) lines.push(`why: ${record.reason}`);
    if (whole) lines.push(`nothing was enqueued for ${lengthText(whole)}; the host meanwhile:`);
    lines.push(...late.map(([name, time]) => `· ${name} ${lengthText(time)}`));
    if (length > whole) lines.push(`launch latency ${lengthText(length - whole)}`);
    return lines.join("\n");
  }

  function iterationText(one) {
    const batch = (from, text) => (from === null ? text : `from iteration ${from}: ${text}`);
    const lines = [`iteration ${one.n}: ${one.order}`, `why: ${one.reason}`, lengthText(one.length),
      `consumed ${batch(one.consumedFrom, one.consumed)}`, `launched ${batch(one.launchedFrom, one.launched)}`, one.graph, `${one.tokens} new tokens`];
    if (one.wasted) lines.push(`wasted rows: ${one.wasted}`);
    if (one.void) lines.push(`times void: ${one.void}`);
    return lines.join("\n");
  }

  function describe(x, y) {
    if (x < GUTTER) return "";
    const slack = 1.5 * span() / (state.width - GUTTER);
    for (const { run, strip, lanes } of state.blocks) {
      const time = toTime(x) + run.align;
      if (y >= strip - 4 && y < strip + STRIP + 2) {
        const moments = run.lanes.instant, moment = moments ? hit(moments, time, slack) : -1;
        if (moment >= 0) return spanText(run, "instant", moments, moment);
        const at = hit({ start: run.starts, length: run.lengths }, time, 0);
        return at < 0 ? "" : iterationText(run.iterations[at]);
      }
      for (const lane of lanes) {
        if (y < lane.top || y >= lane.top + lane.height) continue;
        const low = y > lane.top + lane.height - 10, host = lane.key === "phase";
        const near = host ? [["detail", low && run.lanes.detail], ["host waits", run.lanes.wait]] : [];
        for (const [key, columns] of [...near, [lane.label, run.lanes[lane.key]]]) {
          const at = columns ? hit(columns, time, key === "host waits" ? 0 : slack) : -1;
          if (at >= 0) return spanText(run, key, columns, at);
        }
        const idle = lane.key === "device compute" && run.bubbles.starts
          ? hit({ start: run.bubbles.starts, length: run.bubbles.lengths }, time, 0) : -1;
        if (idle >= 0) return idleText(run, idle);
      }
    }
    return "";
  }

  function hover(event) {
    const box = canvas.getBoundingClientRect();
    const text = describe(event.clientX - box.left, event.clientY - box.top);
    tip.style.display = text ? "block" : "none";
    if (!text) return;
    tip.textContent = text;
    const left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8);
    const below = event.clientY + 16;
    tip.style.left = Math.max(4, left) + "px";
    tip.style.top = (below + tip.offsetHeight > window.innerHeight ? event.clientY - tip.offsetHeight - 10 : below) + "px";
  }

  function swatches(id, entries) {
    const holder = document.getElementById(id);
    for (const [text, style] of entries) {
      const item = document.createElement("span"), box = document.createElement("i");
      Object.assign(box.style, style);
      item.append(box, text);
      holder.append(item);
    }
  }

  function legends() {
    const used = new Set(data.runs.flatMap((run) => ["phase", "device compute", "device copy"].flatMap(
      (key) => (run.lanes[key] ? [...new Set(run.lanes[key].name)].map((name) => run.names[name]) : []))));
    const byColour = new Map();  // names that share a colour share an entry: publish and fetch are both copies
    for (const [name, colour] of Object.entries(data.phaseColours)) {
      if (used.has(name)) byColour.set(colour, [...(byColour.get(colour) || []), name]);
    }
    const copies = data.phaseColours.copy;
    const phases = [...byColour].map(([colour, names]) => [names.join(", ") + (colour === copies ? " (copies)" : ""), colour]);
    const lines = (name) => ({ background: `repeating-linear-gradient(-45deg, var(${name}) 0 1px, transparent 1px 5px)` });
    const marks = [["host waits", lines("--wait")], ["device idle (bubble)", lines("--bubble")],
      ["hidden host work", { background: "var(--hidden)", borderTop: "4px solid var(--hidden-line)" }],
      ["exposed host work", { borderTop: "4px solid var(--bubble)" }]];
    swatches("phases", phases.map(([name, colour]) => [name, { background: colour }]));
    const isForRanks = data.runs.some((run) => run.lanes.wait && run.lanes.wait.name.some((name) => run.names[name] === "ranks"));
    const under = lines("--wait").background;
    if (isForRanks) marks.splice(1, 0, ["host waits for other ranks", { background: `${under}, ${colourOf("ranks")}` }]);
    swatches("marks", marks);
    const orders = new Set(data.runs.flatMap((run) => run.iterations.map((one) => one.order)));
    swatches("orders", [...orders].map((name) => [name, { background: data.orderColours[name] || colourOf("other") }]));
  }

  function listen() {
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const x = event.clientX - canvas.getBoundingClientRect().left;
      tip.style.display = "none";
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX / (state.width - GUTTER));
      else zoom(Math.exp(event.deltaY * 0.0016), toTime(Math.max(x, GUTTER)));
    }, { passive: false });
    let dragX = null;
    const drop = () => { dragX = null; };
    canvas.addEventListener("pointerdown", (event) => { dragX = event.clientX; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointerup", drop);
    canvas.addEventListener("pointercancel", drop);
    canvas.addEventListener("pointermove", (event) => {
      if (dragX === null) { hover(event); return; }
      tip.style.display = "none";
      pan((dragX - event.clientX) / (state.width - GUTTER));
      dragX = event.clientX;
    });
    canvas.addEventListener("pointerleave", () => { tip.style.display = "none"; });
    canvas.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const middle = (state.view.start + state.view.end) / 2;
      const act = { "+": () => zoom(0.7, middle), "=": () => zoom(0.7, middle), "-": () => zoom(1.4, middle),
        ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15), b: showBorder, s: showSteady, w: showWhole,
        Escape: () => { tip.style.display = "none"; } }[event.key];
      if (act) { event.preventDefault(); act(); }
    });
    document.getElementById("border").addEventListener("click", showBorder);
    document.getElementById("steady").addEventListener("click", showSteady);
    document.getElementById("whole").addEventListener("click", showWhole);
    document.getElementById("align").addEventListener("change", (event) => {
      if (event.target.value !== "") alignAt(Number(event.target.value));
    });
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", painter.recolour);
    window.addEventListener("resize", painter.resize);
  }

  data.runs.forEach((run) => { run.steady = run.align; });
  document.getElementById("border").disabled = !bordered.length;
  legends();
  listen();
  const wanted = window.location.hash;
  state.circles = wanted === "#circle";
  painter.resize();
  if (wanted === "#view=whole") showWhole(); else if (wanted === "#view=steady") showSteady(); else showBorder();
})();
