// Gives the page a run as report_data.py made it; report_pack.py tells how it was packed.
"use strict";
function unpackRun(run) {
  function sums(differences) {
    let last = 0;
    return differences.map((difference) => (last += difference));
  }

  function unpackLane(packed) {
    const start = sums(packed.start), lane = { start };
    for (const [name, column] of Object.entries(packed)) {
      if (name !== "start") lane[name] = Array.isArray(column) ? column : start.map(() => column);
    }
    lane.iteration = sums(Array.isArray(packed.iteration) ? packed.iteration : start.map(() => packed.iteration));
    if (lane.enqueued) lane.enqueued = lane.enqueued.map((delay, at) => (delay === null ? null : start[at] - delay));
    return lane;
  }

  function unpackIterations(packed) {
    const numbers = sums(packed.n), starts = sums(packed.start);
    const value = (column, at) => (Array.isArray(column) ? column[at] : column);
    const from = (name, at) => {
      const back = value(packed[name], at);
      return back === null ? null : numbers[at] - back;
    };
    return numbers.map((n, at) => {
      const entry = { n, start: starts[at] };
      for (const name of ["length", "tokens"]) entry[name] = value(packed[name], at);
      for (const name of ["consumedFrom", "launchedFrom"]) entry[name] = from(name, at);
      for (const name of ["order", "reason", "consumed", "launched", "graph", "wasted", "void"]) {
        entry[name] = packed.texts[value(packed[name], at)];
      }
      return entry;
    });
  }

  function unpackStretches(packed) {
    let behind = 0;
    return packed.map((number, at) => {
      const moment = behind + number;
      behind = moment;  // a distance leads to a start, and a length from there to an end
      return at % 2 ? number : moment;
    });
  }

  const lanes = Object.fromEntries(Object.entries(run.lanes).map(([name, lane]) => [name, unpackLane(lane)]));
  const stretches = ["hidden", "exposed", "bubbles"].map((name) => [name, unpackStretches(run[name])]);
  return { ...run, lanes, iterations: unpackIterations(run.iterations), ...Object.fromEntries(stretches) };
}
