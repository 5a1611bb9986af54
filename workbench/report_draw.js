// Paints the timeline on its canvas. Every time is in nanoseconds; each run is shifted so that its `align` moment is 0.
"use strict";
function timelinePainter(data, canvas) {
  const context = canvas.getContext("2d");
  const GUTTER = 118, AXIS = 22, STRIP = 14, TITLE = 20, GAP = 14, NOTE = 22;
  const LANES = [
    { key: "phase", label: "host", height: 32 },
    { key: "device compute", label: "device compute", height: 32 },
    { key: "device copy", label: "device copy", height: 12 },
  ];
  const FACE = "system-ui, 'DejaVu Sans', sans-serif", FONT = `12px ${FACE}`, BOLD = `600 12.5px ${FACE}`;
  const state = { view: { start: 0, end: 1 }, blocks: [], width: 0, circles: false, atBorder: false };
  let height = 0, frame = 0, colours = {}, hatches = {};

  const css = (name) => colours[name] || (colours[name] = getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  const colourOf = (name) => data.phaseColours[name] || data.phaseColours.other;

  // A copy without a colour of its own takes that of its kind, other work that of the phase around it.
  function spanColour(run, lane, at, kind) {
    const name = run.names[lane.name[at]], phase = lane.phase[at];
    if (data.phaseColours[name]) return data.phaseColours[name];
    if (kind === "device copy") return colourOf("copy");
    return colourOf(phase >= 0 ? run.names[phase] : "other");
  }

  function ink(hex) {
    const value = parseInt(hex.slice(1), 16);
    const light = 0.299 * (value >> 16) + 0.587 * ((value >> 8) & 255) + 0.114 * (value & 255);
    return light > 140 ? "#14181f" : "#ffffff";
  }

  // Diagonal lines as a fill; made at the screen's own resolution so that they stay sharp.
  function hatch(name) {
    if (hatches[name]) return hatches[name];
    const scale = window.devicePixelRatio || 1, size = Math.round(7 * scale);
    const tile = document.createElement("canvas"), pen = tile.getContext("2d");
    tile.width = tile.height = size;
    pen.strokeStyle = css(name);
    pen.lineWidth = Math.max(1, scale);
    pen.beginPath();
    for (const shift of [-size, 0, size]) { pen.moveTo(shift - 1, size + 1); pen.lineTo(shift + size + 1, -1); }
    pen.stroke();
    const pattern = context.createPattern(tile, "repeat");
    pattern.setTransform(new DOMMatrix().scale(1 / scale));
    return (hatches[name] = pattern);
  }

  function lanesOf(run) {
    const extra = Object.keys(run.lanes).filter((key) => key.startsWith("device ") && !LANES.some((l) => l.key === key));
    return [...LANES, ...extra.map((key) => ({ key, label: key, height: 20 }))].filter(
      (lane) => lane.key === "phase" || lane.key === "device compute" || run.lanes[lane.key]);
  }

  function layout() {
    let y = AXIS;
    state.blocks = data.runs.map((run) => {
      const block = { run, top: y, strip: y + TITLE, lanes: [] };
      y += TITLE + STRIP + 9;
      for (const lane of lanesOf(run)) {
        block.lanes.push({ ...lane, top: y });
        y += lane.height + 4;
        if (lane.key === "phase" && run.border) { block.note = y; y += NOTE; }
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
    hatches = {};
    state.width = canvas.clientWidth;
    canvas.style.height = height + "px";
    canvas.width = Math.round(state.width * scale);
    canvas.height = Math.round(height * scale);
    context.setTransform(scale, 0, 0, scale, 0, 0);
    draw();
  }

  function recolour() { colours = {}; hatches = {}; redraw(); }

  const span = () => state.view.end - state.view.start;
  const toX = (time) => GUTTER + (time - state.view.start) * (state.width - GUTTER) / span();
  const toTime = (x) => state.view.start + (x - GUTTER) * span() / (state.width - GUTTER);

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

  // With more stretches than pixels each is painted as thin as it is, so that a pixel's shade tells how much of it they
  // fill; with fewer, each gets the least width that can be seen.
  let least = 0.8;
  function eachVisible(run, starts, lengths, use) {
    const from = state.view.start + run.align, to = state.view.end + run.align;
    const first = firstVisible(starts, lengths, from), behind = lowerBound(starts, to);
    least = behind - first > state.width ? 0 : 0.8;
    for (let at = first; at < behind; at++) {
      if (starts[at] + lengths[at] < from) continue;
      const left = toX(starts[at] - run.align), right = toX(starts[at] + lengths[at] - run.align);
      use(at, Math.max(left, GUTTER - 1), Math.min(right, state.width + 1), left);
    }
  }

  function label(text, from, to, middle, colour) {
    const wide = to - Math.max(from, GUTTER);
    if (!text || wide < 20 || context.measureText(text).width + 8 > wide) return;
    context.fillStyle = colour;
    context.fillText(text, Math.max(from, GUTTER) + 4, middle + 0.5);
  }

  function bar(left, right, top, tall, colour, text) {
    const from = Math.max(left, GUTTER), wide = Math.max(right - from, least);
    context.fillStyle = colour;
    context.fillRect(from, top, wide > 4 ? wide - 0.8 : wide, tall);
    label(text, from, right, top + tall / 2, typeof colour === "string" ? ink(colour) : css("--soft"));
  }

  function drawLane(block, lane) {
    const { run } = block, columns = run.lanes[lane.key];
    if (!columns) return;
    eachVisible(run, columns.start, columns.length, (at, left, right) => {
      const name = run.names[columns.name[at]];
      const text = name === "forward" && lane.key === "device compute" ? `forward ${columns.iteration[at]}` : name;
      bar(left, right, lane.top, lane.height, spanColour(run, columns, at, lane.key), lane.height > 16 ? text : "");
    });
  }

  const RANKS = "ranks";  // the wait for the hosts of other ranks

  // The host's lane is work; where a phase waits for the device it is empty but for grey lines. Each stretch of work
  // has its own label, since a wait may stand between two.
  function drawHost(block, lane) {
    const { run } = block, phases = run.lanes.phase, waits = run.lanes.wait;
    if (!phases) return;
    eachVisible(run, phases.start, phases.length, (at, left, right) => {
      const end = phases.start[at] + phases.length[at], name = run.names[phases.name[at]];
      const colour = colourOf(name);
      let from = left, index = waits ? lowerBound(waits.start, phases.start[at]) : 0;
      for (; waits && index < waits.start.length && waits.start[index] < end; index++) {
        const low = toX(waits.start[index] - run.align), high = toX(waits.start[index] + waits.length[index] - run.align);
        if (low > from) bar(from, Math.min(low, state.width), lane.top, lane.height, colour, name);
        const awaited = run.names[waits.name[index]], isForRanks = awaited === RANKS;
        const text = `${name} waits for ${isForRanks ? "other ranks" : awaited}`;
        drawWait(Math.max(low, GUTTER), Math.min(high, state.width), lane, text, isForRanks ? colourOf(RANKS) : css("--lane"));
        from = Math.max(from, high);
      }
      if (right > from || right - left < least) bar(Math.min(from, right), right, lane.top, lane.height, colour, name);
    });
    if (run.lanes.detail) drawDetails(block, lane);
  }

  function drawWait(left, right, lane, text, under) {
    if (right - left < 0.05) return;
    context.fillStyle = under;
    context.fillRect(left, lane.top, right - left, lane.height);
    context.fillStyle = hatch("--wait");
    context.fillRect(left, lane.top, right - left, lane.height);
    const moment = toX(0);
    if (!state.atBorder || moment <= left || moment >= right) plate(text, left, right, lane, css("--soft"));
    else if (moment - left > right - moment) plate(text, left, moment, lane, css("--soft"));
    else plate(text, moment, right, lane, css("--soft"));
  }

  // Words on hatching stand on a plate, in the middle of what can be seen.
  function plate(text, left, right, lane, colour) {
    const size = context.measureText(text).width, middle = (left + right) / 2;
    if (right - left < size + 20) return;
    context.fillStyle = css("--lane");
    context.fillRect(middle - size / 2 - 5, lane.top + 6, size + 10, lane.height - 12);
    context.fillStyle = colour;
    context.fillText(text, middle - size / 2, lane.top + lane.height / 2 + 0.5);
  }

  // Host spans inside a phase: a dark stripe along its lower edge, one step thinner for each depth.
  function drawDetails(block, lane) {
    const { run } = block, details = run.lanes.detail;
    context.fillStyle = "rgba(0, 0, 0, 0.38)";
    eachVisible(run, details.start, details.length, (at, left, right) => {
      if (right - left < 1.5) return;
      const tall = Math.max(3, 9 - 2 * (details.depth[at] - 1));
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

  const hostLane = (block) => block.lanes.find((lane) => lane.key === "phase");
  const deviceLane = (block) => block.lanes.find((lane) => lane.key === "device compute");

  // Behind the bars, a band through host and device lanes where host work is hidden: "at the same time" can be seen.
  function drawBands(block) {
    const host = hostLane(block), device = deviceLane(block);
    context.fillStyle = css("--hidden");
    eachPair(block.run, block.run.hidden, (left, right) => {
      context.fillRect(left, host.top - 4, Math.max(right - left, least), device.top + device.height - host.top + 8);
    });
  }

  // Above the host's bars, a line: black (white on dark) where its work is hidden, red where the device stands idle meanwhile.
  function drawVerdict(block) {
    const host = hostLane(block);
    for (const [stretches, colour] of [[block.run.hidden, "--hidden-line"], [block.run.exposed, "--bubble"]]) {
      context.fillStyle = css(colour);
      eachPair(block.run, stretches, (left, right) => {
        context.fillRect(left, host.top - 5, Math.max(right - left, least), 4);
      });
    }
  }

  function drawBubbles(block) {
    const lane = deviceLane(block);
    eachPair(block.run, block.run.bubbles, (left, right) => {
      context.fillStyle = css("--lane");
      context.fillRect(left, lane.top, right - left, lane.height);
      context.fillStyle = hatch("--bubble");
      context.fillRect(left, lane.top, right - left, lane.height);
      const room = right - left > 100 ? "device idle" : "idle";
      plate(room, left, right, lane, css("--bubble"));
    });
  }

  function drawStrip(block) {
    const { run } = block;
    if (!run.starts) {
      run.starts = run.iterations.map((one) => one.start);
      run.lengths = run.iterations.map((one) => one.length);
    }
    eachVisible(run, run.starts, run.lengths, (at, left, right, begins) => {
      const one = run.iterations[at], wide = right - left;
      const colour = data.orderColours[one.order] || colourOf("other");
      context.globalAlpha = one.void ? 0.35 : 1;
      bar(left, right, block.strip, STRIP, colour, wide > 110 ? `iteration ${one.n}  ${one.order}` : String(one.n));
      context.globalAlpha = 1;
      if (wide > 30 && begins >= GUTTER) {
        context.fillStyle = css("--line");
        context.fillRect(begins - 0.5, block.strip, 1, block.bottom - block.strip - 4);
      }
    });
    const moments = run.lanes.instant;
    if (!moments) return;
    context.fillStyle = css("--text");
    eachVisible(run, moments.start, moments.length, (at, left) => {
      if (left >= GUTTER) context.fillRect(left - 0.75, block.strip - 4, 1.5, STRIP + 6);
    });
  }

  // Under the host's work at the border, what it meant: a bracket and one line.
  function drawNote(block) {
    const { run } = block, mark = run.border;
    if (!mark) return;
    const left = toX(mark.workStart - run.align), right = toX(mark.workEnd - run.align);
    if (right - left < 60 || right < GUTTER || left > state.width) return;
    const colour = css(mark.isHidden ? "--hidden-line" : "--bubble"), y = block.note;
    context.strokeStyle = colour;
    context.lineWidth = 1.5;
    context.beginPath();
    context.moveTo(left, y - 2); context.lineTo(left, y + 2); context.lineTo(right, y + 2); context.lineTo(right, y - 2);
    context.stroke();
    context.font = BOLD;
    const size = context.measureText(mark.text).width;
    const x = Math.max(GUTTER + 4, Math.min(left + 5, state.width - size - 6));
    context.fillStyle = css("--panel");
    context.fillRect(x - 3, y + 4, size + 6, NOTE - 6);
    context.fillStyle = colour;
    context.fillText(mark.text, x, y + 12, state.width - GUTTER - 8);
    context.font = FONT;
  }

  // The moment that both runs share, through all lanes.
  function drawMoment() {
    const x = toX(0);
    if (!state.atBorder || x < GUTTER || x > state.width) return;
    context.strokeStyle = css("--text");
    context.lineWidth = 1;
    context.setLineDash([4, 3]);
    for (const block of state.blocks) {
      if (!block.run.border) continue;
      context.beginPath();
      context.moveTo(x, block.strip - 2);
      context.lineTo(x, block.bottom - 4);
      context.stroke();
      context.fillStyle = css("--text");
      const text = `forward ${block.run.border.finished} is done and sampled`;
      context.fillText(text, Math.max(GUTTER, x - context.measureText(text).width - 6), block.top + TITLE / 2);
    }
    context.setLineDash([]);
  }

  // Opened with #circle: a ring around the host's work and what the device does meanwhile.
  function drawRing(block) {
    const { run } = block, mark = run.border, host = hostLane(block), device = deviceLane(block);
    if (!state.circles || !mark) return;
    const left = toX(mark.workStart - run.align) - 14, right = toX(mark.workEnd - run.align) + 14;
    const top = host.top - 7.5, bottom = device.top + device.height + 7;
    context.strokeStyle = css(mark.isHidden ? "--hidden-line" : "--bubble");
    context.lineWidth = 3;
    context.beginPath();
    context.roundRect(left, top, right - left, bottom - top, 26);
    context.stroke();
  }

  function timeText(ns, step) {
    const [unit, size] = Math.abs(step) >= 1e9 ? ["s", 1e9] : Math.abs(step) >= 1e5 ? ["ms", 1e6]
      : Math.abs(step) >= 1e3 ? ["µs", 1e3] : ["ns", 1];
    return `${(ns / size).toLocaleString("en", { maximumFractionDigits: 3 }).replace("-", "−")} ${unit}`;
  }

  function drawAxis() {
    const rough = span() / Math.max(2, (state.width - GUTTER) / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
    context.fillStyle = css("--soft");
    for (let tick = Math.ceil(state.view.start / step) * step; tick <= state.view.end; tick += step) {
      const x = toX(tick);
      context.fillRect(x, AXIS - 6, 1, 5);
      const text = timeText(Math.round(tick) || 0, step);  // no -0
      if (x + context.measureText(text).width < state.width) context.fillText(text, x + 3, 9);
    }
  }

  function draw() {
    frame = 0;
    context.clearRect(0, 0, state.width, height);
    context.font = FONT;
    context.textBaseline = "middle";
    drawAxis();
    for (const block of state.blocks) {
      for (const lane of block.lanes) {
        context.fillStyle = css("--lane");
        context.fillRect(GUTTER, lane.top, state.width - GUTTER, lane.height);
      }
      drawBands(block);
      drawStrip(block);
      for (const lane of block.lanes) if (lane.key === "phase") drawHost(block, lane); else drawLane(block, lane);
      drawBubbles(block);
      drawVerdict(block);
    }
    drawMoment();
    for (const block of state.blocks) { drawRing(block); drawNote(block); drawLabels(block); }
  }

  function drawLabels(block) {
    context.clearRect(0, block.strip - 6, GUTTER - 1, block.bottom - block.strip + 6);
    context.fillStyle = css("--text");
    context.font = `600 13px ${FACE}`;
    fitted(block.run.name, 0, block.top + TITLE / 2, GUTTER + (state.atBorder ? 0 : 400));
    context.font = FONT;
    context.fillStyle = css("--soft");
    context.fillText("iterations", 0, block.strip + STRIP / 2);
    for (const lane of block.lanes) fitted(lane.label, 0, lane.top + lane.height / 2, GUTTER - 6);
  }

  // Shortened at its end, never squeezed.
  function fitted(text, x, y, room) {
    let shown = text;
    while (shown.length > 1 && context.measureText(shown).width > room) shown = shown.slice(0, -2) + "…";
    context.fillText(shown, x, y);
  }

  const redraw = () => { if (!frame) frame = requestAnimationFrame(draw); };

  function show(start, end) {
    const least = 200;  // ns
    if (end - start < least) { const middle = (start + end) / 2; start = middle - least / 2; end = middle + least / 2; }
    state.view = { start, end };
    redraw();
  }

  return { state, GUTTER, STRIP, css, colourOf, resize, recolour, redraw, show, span, toTime, firstVisible };
}
