// Draws the report's timeline. Every time is in nanoseconds; each run is shifted so that its `align` moment is 0.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const canvas = document.getElementById("timeline");
  const context = canvas.getContext("2d");
  const tip = document.getElementById("tip");
  const GUTTER = 118, AXIS = 22, STRIP = 14, TITLE = 18, GAP = 16;
  const LANES = [
    { key: "phase", label: "host phases", height: 30 },
    { key: "wait", label: "host waits", height: 12 },
    { key: "device compute", label: "device compute", height: 30 },
    { key: "device copy", label: "device copy", height: 12 },
  ];
  const FONT = "12px system-ui, 'DejaVu Sans', sans-serif";
  let view = { start: 0, end: 1 };
  let width = 0, height = 0, blocks = [], frame = 0;

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colourOf = (name) => data.phaseColours[name];

  // A detail or copy without a colour of its own takes that of the phase around it, then of its kind.
  function spanColour(run, lane, at, kind) {
    const phase = lane.phase[at];
    return colourOf(run.names[lane.name[at]]) || (kind === "device copy" && colourOf("copy"))
      || (phase >= 0 && colourOf(run.names[phase])) || colourOf("other");
  }

  function ink(hex) {
    const value = parseInt(hex.slice(1), 16);
    const light = 0.299 * (value >> 16) + 0.587 * ((value >> 8) & 255) + 0.114 * (value & 255);
    return light > 140 ? "#14181f" : "#ffffff";
  }

  function lanesOf(run) {
    const extra = Object.keys(run.lanes).filter((key) => key.startsWith("device ") && !LANES.some((l) => l.key === key));
    return [...LANES, ...extra.map((key) => ({ key, label: key, height: 20 }))].filter(
      (lane) => lane.key === "phase" || lane.key === "device compute" || run.lanes[lane.key]);
  }

  function layout() {
    let y = AXIS;
    blocks = data.runs.map((run) => {
      const block = { run, top: y, strip: y + TITLE, lanes: [] };
      y += TITLE + STRIP + 6;
      for (const lane of lanesOf(run)) {
        block.lanes.push({ ...lane, top: y });
        y += lane.height + 4;
      }
      block.bottom = y;
      y += GAP;
      return block;
    });
    height = y - GAP + 4;
  }

  function resize() {
    const scale = window.devicePixelRatio || 1;
    layout();
    width = canvas.clientWidth;
    canvas.style.height = height + "px";
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    context.setTransform(scale, 0, 0, scale, 0, 0);
    draw();
  }

  const toX = (time) => GUTTER + (time - view.start) * (width - GUTTER) / (view.end - view.start);
  const toTime = (x) => view.start + (x - GUTTER) * (view.end - view.start) / (width - GUTTER);

  // Index of the first start that is not before `time`.
  function lowerBound(starts, time) {
    let low = 0, high = starts.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (starts[middle] < time) low = middle + 1; else high = middle;
    }
    return low;
  }

  // Longest span of a lane: how far left of the view a visible one may begin.
  const reach = new WeakMap();
  function firstVisible(starts, lengths, time) {
    if (!reach.has(starts)) reach.set(starts, lengths.reduce((most, length) => Math.max(most, length), 0));
    return lowerBound(starts, time - reach.get(starts));
  }

  function eachVisible(run, starts, lengths, use) {
    const from = view.start + run.align, to = view.end + run.align;
    for (let at = firstVisible(starts, lengths, from); at < starts.length && starts[at] <= to; at++) {
      if (starts[at] + lengths[at] < from) continue;
      use(at, toX(starts[at] - run.align), toX(starts[at] + lengths[at] - run.align));
    }
  }

  function bar(left, right, top, tall, colour, label) {
    const from = Math.max(left, GUTTER), wide = Math.max(right - from, 0.8);
    context.fillStyle = colour;
    context.fillRect(from, top, wide > 4 ? wide - 0.8 : wide, tall);
    if (!label || wide < 24) return;
    const size = context.measureText(label).width;
    if (size + 8 > wide) return;
    context.fillStyle = ink(colour);
    context.fillText(label, from + 4, top + tall / 2 + 0.5);
  }

  function drawLane(block, lane) {
    const { run } = block, columns = run.lanes[lane.key];
    if (!columns) return;
    let last = -1;
    eachVisible(run, columns.start, columns.length, (at, left, right) => {
      if (right < last + 0.7 && right - left < 1) return;  // would repaint the pixel just drawn
      last = right;
      const colour = lane.key === "wait" ? css("--wait") : spanColour(run, columns, at, lane.key);
      bar(left, right, lane.top, lane.height, colour, lane.height > 16 ? run.names[columns.name[at]] : "");
    });
    if (lane.key === "phase" && run.lanes.detail) drawDetails(block, lane);
  }

  // Host spans inside a phase: a dark stripe along its lower edge, one step thinner for each depth.
  function drawDetails(block, lane) {
    const { run } = block, details = run.lanes.detail;
    eachVisible(run, details.start, details.length, (at, left, right) => {
      if (right - left < 1.5) return;
      const tall = Math.max(3, 9 - 2 * (details.depth[at] - 1));
      context.fillStyle = "rgba(0, 0, 0, 0.38)";
      context.fillRect(Math.max(left, GUTTER), lane.top + lane.height - tall, right - Math.max(left, GUTTER) - 0.8, tall);
    });
  }

  function eachPair(run, flat, use) {
    if (!flat.starts) {
      flat.starts = flat.filter((_, at) => at % 2 === 0);
      flat.lengths = flat.filter((_, at) => at % 2 === 1);
    }
    eachVisible(run, flat.starts, flat.lengths, (at, left, right) => use(Math.max(left, GUTTER), right));
  }

  // Behind the bars, a band through host and device lanes where host work is hidden: "at the same time" can be seen.
  function drawBands(block) {
    const { host, device } = twoLanes(block);
    context.fillStyle = css("--hidden");
    eachPair(block.run, block.run.hidden, (left, right) => {
      context.fillRect(left, host.top - 4, Math.max(right - left, 0.6), device.top + device.height - host.top + 8);
    });
  }

  // Above the host's bars, a line: green where its work is hidden, red where the device stands idle meanwhile.
  function drawVerdict(block) {
    const { host } = twoLanes(block);
    for (const [stretches, colour] of [[block.run.hidden, "--hidden-line"], [block.run.exposed, "--bubble"]]) {
      context.fillStyle = css(colour);
      eachPair(block.run, stretches, (left, right) => {
        context.fillRect(left, host.top - 5, Math.max(right - left, 0.6), 4);
      });
    }
  }

  const twoLanes = (block) => ({
    host: block.lanes.find((lane) => lane.key === "phase"),
    device: block.lanes.find((lane) => lane.key === "device compute"),
  });

  function drawBubbles(block) {
    const lane = block.lanes.find((one) => one.key === "device compute");
    context.save();
    context.strokeStyle = css("--bubble");
    context.fillStyle = css("--bubble");
    eachPair(block.run, block.run.bubbles, (left, right) => {
      if (right - left < 2) return;
      context.save();
      context.beginPath();
      context.rect(left, lane.top, right - left, lane.height);
      context.clip();
      context.globalAlpha = 0.55;
      context.beginPath();
      for (let x = left - lane.height; x < right; x += 6) {
        context.moveTo(x, lane.top + lane.height);
        context.lineTo(x + lane.height, lane.top);
      }
      context.stroke();
      context.restore();
      if (right - left > 62) {
        const label = "bubble", size = context.measureText(label).width, middle = (left + right) / 2;
        context.fillStyle = css("--lane");
        context.fillRect(middle - size / 2 - 4, lane.top + 7, size + 8, lane.height - 14);
        context.fillStyle = css("--bubble");
        context.fillText(label, middle - size / 2, lane.top + lane.height / 2 + 0.5);
      }
    });
    context.restore();
  }

  function drawStrip(block) {
    const { run } = block;
    if (!run.starts) {
      run.starts = run.iterations.map((one) => one.start);
      run.lengths = run.iterations.map((one) => one.length);
    }
    eachVisible(run, run.starts, run.lengths, (at, left, right) => {
      const one = run.iterations[at], wide = right - left;
      const colour = data.orderColours[one.order] || colourOf("other");
      context.globalAlpha = one.void ? 0.35 : 1;
      bar(left, right, block.strip, STRIP, colour, wide > 130 ? `${one.n}  ${one.order}` : String(one.n));
      context.globalAlpha = 1;
      if (wide > 30 && left >= GUTTER) {
        context.fillStyle = css("--line");
        context.fillRect(left - 0.5, block.strip, 1, block.bottom - block.strip - 4);
      }
    });
    const moments = run.lanes.instant;
    if (!moments) return;
    context.fillStyle = css("--text");
    eachVisible(run, moments.start, moments.length, (at, left) => {
      if (left >= GUTTER) context.fillRect(left - 0.75, block.strip - 4, 1.5, STRIP + 6);
    });
  }

  function timeText(ns, step) {
    const [unit, size] = Math.abs(step) >= 1e9 ? ["s", 1e9] : Math.abs(step) >= 1e6 ? ["ms", 1e6]
      : Math.abs(step) >= 1e3 ? ["µs", 1e3] : ["ns", 1];
    return `${(ns / size).toLocaleString("en", { maximumFractionDigits: 3 })} ${unit}`;
  }

  function drawAxis() {
    const rough = (view.end - view.start) / Math.max(2, (width - GUTTER) / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
    context.fillStyle = css("--soft");
    for (let tick = Math.ceil(view.start / step) * step; tick <= view.end; tick += step) {
      const x = toX(tick);
      context.fillRect(x, AXIS - 6, 1, 5);
      const label = timeText(Math.round(tick) || 0, step);  // no -0
      if (x + context.measureText(label).width < width) context.fillText(label, x + 3, 9);
    }
  }

  function draw() {
    frame = 0;
    context.clearRect(0, 0, width, height);
    context.font = FONT;
    context.textBaseline = "middle";
    drawAxis();
    for (const block of blocks) {
      for (const lane of block.lanes) {
        context.fillStyle = css("--lane");
        context.fillRect(GUTTER, lane.top, width - GUTTER, lane.height);
      }
      drawBands(block);
      drawStrip(block);
      for (const lane of block.lanes) drawLane(block, lane);
      drawBubbles(block);
      drawVerdict(block);
      drawLabels(block);
    }
  }

  function drawLabels(block) {
    context.clearRect(0, block.top, GUTTER - 1, block.bottom - block.top);
    context.fillStyle = css("--text");
    context.font = "600 13px system-ui, 'DejaVu Sans', sans-serif";
    context.fillText(block.run.name, 0, block.top + TITLE / 2, width - 4);
    context.font = FONT;
    context.fillStyle = css("--soft");
    context.fillText("iterations", 0, block.strip + STRIP / 2);
    for (const lane of block.lanes) context.fillText(lane.label, 0, lane.top + lane.height / 2, GUTTER - 6);
  }

  const redraw = () => { if (!frame) frame = requestAnimationFrame(draw); };

  function show(start, end) {
    const least = 200;  // ns
    if (end - start < least) { const middle = (start + end) / 2; start = middle - least / 2; end = middle + least / 2; }
    view = { start, end };
    redraw();
  }

  function explain() {
    const steady = data.runs.every((run) => run.isSteady);
    document.getElementById("caption").textContent = (steady
      ? "At first: a few decode iterations of each run, aligned where the first of them begins. "
      : "At first: the first iterations of each run. ")
      + "Green: host work while the device's compute lane is busy (hidden). "
      + "Red: host work while it is idle (exposed); hatching marks the bubbles. "
      + "Whether hiding gained time is told by the step time, not by the colour.";
  }

  function showSteady() {
    data.runs.forEach((run) => { run.align = run.steady; });
    const most = Math.max(...data.runs.map((run) => run.viewLength));
    show(-0.02 * most, 1.02 * most);
  }

  function showWhole() {
    data.runs.forEach((run) => { run.align = 0; });
    const ends = data.runs.map((run) => Math.max(1, ...Object.values(run.lanes).map(
      (lane) => lane.start.reduce((most, start, at) => Math.max(most, start + lane.length[at]), 0)),
      run.iterations.reduce((most, one) => Math.max(most, one.start + one.length), 0)));
    const most = Math.max(...ends);
    show(-0.01 * most, 1.01 * most);
  }

  function alignAt(number) {
    let found = false;
    for (const run of data.runs) {
      const one = run.iterations.find((each) => each.n === number);
      if (one) { run.align = one.start; found = true; }
    }
    const length = view.end - view.start;
    if (found) show(-0.02 * length, 0.98 * length);
  }

  function zoom(factor, at) {
    show(at - (at - view.start) * factor, at + (view.end - at) * factor);
  }

  function pan(part) {
    const shift = part * (view.end - view.start);
    show(view.start + shift, view.end + shift);
  }

  // The shortest span under the pointer, so that what is drawn on top is what is named.
  function hit(run, columns, time) {
    let best = -1;
    const slack = 1.5 * (view.end - view.start) / (width - GUTTER);
    for (let at = firstVisible(columns.start, columns.length, time - slack); at < columns.start.length; at++) {
      if (columns.start[at] > time + slack) break;
      if (columns.start[at] + columns.length[at] < time - slack) continue;
      if (best < 0 || columns.length[at] < columns.length[best]) best = at;
    }
    return best;
  }

  const ns = (number) => `${number.toLocaleString("en")} ns`;

  function spanText(run, key, columns, at) {
    const iteration = columns.iteration[at], record = run.iterations.find((one) => one.n === iteration);
    const lines = [`${run.names[columns.name[at]]}  (${key})`, ns(columns.length[at])];
    lines.push(iteration < 0 ? "outside every iteration" : `iteration ${iteration}${record ? ", " + record.order : ""}`);
    if (columns.enqueued && columns.enqueued[at] !== null) {
      const delay = columns.start[at] - columns.enqueued[at];  // negative: it ran before the host came back
      lines.push(delay > 0 ? `began ${ns(delay)} after it was enqueued` : "began as it was enqueued");
    } else if (columns.phase[at] >= 0 && columns.phase[at] !== columns.name[at]) {
      lines.push(`in ${run.names[columns.phase[at]]}`);
    }
    if (columns.args && columns.args[at]) lines.push(columns.args[at]);
    return lines.join("\n");
  }

  function iterationText(one) {
    const lines = [`iteration ${one.n}: ${one.order}`, `why: ${one.reason}`, ns(one.length),
      `consumed ${one.consumed}`, `launched ${one.launched}`, one.graph, `${one.tokens} new tokens`];
    if (one.wasted) lines.push(`wasted rows: ${one.wasted}`);
    if (one.void) lines.push(`times void: ${one.void}`);
    return lines.join("\n");
  }

  function describe(x, y) {
    if (x < GUTTER) return "";
    for (const { run, strip, lanes } of blocks) {
      const time = toTime(x) + run.align;
      if (y >= strip - 4 && y < strip + STRIP + 2) {
        const moments = run.lanes.instant, moment = moments ? hit(run, moments, time) : -1;
        if (moment >= 0) return spanText(run, "instant", moments, moment);
        const at = hit(run, { start: run.starts, length: run.lengths }, time);
        return at < 0 ? "" : iterationText(run.iterations[at]);
      }
      for (const lane of lanes) {
        if (y < lane.top || y >= lane.top + lane.height) continue;
        const inner = lane.key === "phase" && y > lane.top + lane.height - 10 ? run.lanes.detail : null;
        for (const [key, columns] of [["detail", inner], [lane.label, run.lanes[lane.key]]]) {
          const at = columns ? hit(run, columns, time) : -1;
          if (at >= 0) return spanText(run, key, columns, at);
        }
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
    for (const [label, style] of entries) {
      const item = document.createElement("span"), box = document.createElement("i");
      Object.assign(box.style, style);
      item.append(box, label);
      holder.append(item);
    }
  }

  function legends() {
    const used = new Set(data.runs.flatMap((run) => ["phase", "device compute"].flatMap(
      (key) => (run.lanes[key] ? run.lanes[key].name.map((name) => run.names[name]) : []))));
    const phases = Object.entries(data.phaseColours).filter(([name]) => used.has(name));
    const marks = [["host waits", { background: "var(--wait)" }], ["copy", { background: colourOf("copy") }],
      ["hidden host time", { background: "var(--hidden)", borderTop: "4px solid var(--hidden-line)" }],
      ["exposed host time", { borderTop: "4px solid var(--bubble)" }],
      ["bubble", { background: "repeating-linear-gradient(-45deg, var(--bubble) 0 1px, transparent 1px 5px)" }]];
    swatches("phases", [...phases.map(([name, colour]) => [name, { background: colour }]), ...marks]);
    const orders = new Set(data.runs.flatMap((run) => run.iterations.map((one) => one.order)));
    swatches("orders", [...orders].map((name) => [name, { background: data.orderColours[name] || colourOf("other") }]));
  }

  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const x = event.clientX - canvas.getBoundingClientRect().left;
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX / (width - GUTTER));
    else zoom(Math.exp(event.deltaY * 0.0016), toTime(Math.max(x, GUTTER)));
  }, { passive: false });
  let dragX = null;
  canvas.addEventListener("pointerdown", (event) => { dragX = event.clientX; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", () => { dragX = null; });
  canvas.addEventListener("pointercancel", () => { dragX = null; });
  canvas.addEventListener("pointermove", (event) => {
    if (dragX === null) { hover(event); return; }
    tip.style.display = "none";
    pan((dragX - event.clientX) / (width - GUTTER));
    dragX = event.clientX;
  });
  canvas.addEventListener("pointerleave", () => { tip.style.display = "none"; });
  canvas.addEventListener("keydown", (event) => {
    const middle = (view.start + view.end) / 2;
    const act = { "+": () => zoom(0.7, middle), "=": () => zoom(0.7, middle), "-": () => zoom(1.4, middle),
      ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15), s: showSteady, f: showWhole }[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  document.getElementById("steady").addEventListener("click", showSteady);
  document.getElementById("whole").addEventListener("click", showWhole);
  document.getElementById("align").addEventListener("change", (event) => {
    if (event.target.value !== "") alignAt(Number(event.target.value));
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  window.addEventListener("resize", resize);

  data.runs.forEach((run) => { run.steady = run.align; });
  legends();
  explain();
  if (window.location.hash === "#view=whole") showWhole(); else showSteady();
  resize();
})();
