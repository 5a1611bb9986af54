// What lies under a point of the canvas: lines to show, and the iteration that a click there selects.
import { NONE } from "./timeline_table.js";
import { GUTTER } from "./timeline_brush.js";
import { COLLECTIVE } from "./timeline_paint.js";
import { lengthText } from "./timeline_text.js";

const STRIP_REACH = 20;

// {lines, iteration}, or null where nothing is.
export function thingAt(painter, x, y) {
  const { store, texts, boxes } = painter;
  if (x < GUTTER || !painter.view || store.isEmpty) return null;
  const moment = painter.shownAt(x), slack = 1.5 / painter.perPixel;
  const box = boxes.find((one) => x >= one.left && x <= one.right && y >= one.top && y < one.bottom);
  if (box) return { lines: box.lines(), iteration: box.iteration };
  for (const block of painter.blocks) {
    if (y < block.top || y > block.bottom) continue;
    const placed = block.lanes.find(({ top, height, details }) => y >= top && y <= top + height + details);
    const found = placed ? inLane(texts, block.group, placed, moment, slack, y)
      : y >= block.strip - 4 && y <= block.strip + STRIP_REACH ? inStrip(texts, block.group, moment, slack) : null;
    if (found) return found;
    const empty = inNothing(store, block.group, moment);
    if (empty) return empty;
  }
  return null;
}

function inStrip(texts, group, moment, slack) {
  for (const lane of group.lanes) {
    const moments = lane.tables.instant, row = moments ? moments.hit(moment, 2 * slack) : NONE;
    if (row !== NONE) return { lines: texts.span(group, lane, "instant", moments, row), iteration: moments.iteration[row] };
  }
  const row = group.iterations ? group.iterations.hit(moment, slack) : NONE;
  return row === NONE ? null : { lines: texts.iteration(group, row), iteration: group.iterations.number[row] };
}

// What is painted on top is what is named: details below the bars, waits over them, and the shortest of several.
function inLane(texts, group, { lane, top, height }, moment, slack, y) {
  const isAbove = lane.hasCollectives && y < top + height - COLLECTIVE;
  const kinds = y > top + height ? ["detail"] : isAbove ? ["bar"] : ["wait", "bar"];
  for (const kind of kinds) {
    const table = lane.tables[kind], row = table ? table.hit(moment, kind === "wait" ? 0 : slack) : NONE;
    if (row !== NONE) return { lines: texts.span(group, lane, kind, table, row), iteration: table.iteration[row] };
  }
  if (lane.name !== "compute" || !group.bubbles) return null;
  const row = group.bubbles.hit(moment);
  return row === NONE ? null : { lines: texts.bubble(group, row), iteration: group.bubbles.iteration[row] };
}

function inNothing(store, group, moment) {
  const { axis } = store, inside = ([start, end]) => moment >= axis.shown(start) && moment <= axis.shown(end);
  const skipped = group.skipped.find(inside);
  if (skipped) return { lines: [`not sent · ${lengthText(skipped[1] - skipped[0])}`, "more was recorded than a live view may cost", "Load brings it"], iteration: NONE };
  const pause = axis.isCut ? axis.pauses.find(({ start, end }) => inside([start, end])) : null;
  return pause ? { lines: [`pause · ${lengthText(pause.end - pause.start)}`, "nothing ran on host or device", "cut out of the axis"], iteration: NONE } : null;
}
