// Moments that stand out: a row that paused or went on, a request that was evicted or aborted, a rewind. A flag on the strip of the
// iterations, named in the row of the axis where there is room.
import { GUTTER } from "./timeline_brush.js";

const HALF = 4.5, TALL = 6;  // of the flag, px
const TOGETHER = 60;  // marks nearer to the first of them than this have one name, px
export const REWIND = "rewind";  // one an iteration with drafts: a tick without a flag
const QUIET_APART = 9, QUIET_NAMED = 90;  // px: those nearer to the first of them are one tick, of their sum
const TICK = 12, BROAD = 7, THIN = 3;  // of a tick: its height, how wide accepted drafts are and how wide others, px
const NAMED = 2;  // of those, the others are counted

export function drawMarks(painter, { group, strip }, tall) {
  const { pen, look } = painter, marks = visibleMarks(painter, group);
  for (const tick of ticksOf(marks.filter(({ isQuiet }) => isQuiet))) drawTick(painter, tick, strip);
  for (const { x } of marks.filter(({ isQuiet }) => !isQuiet)) {
    pen.fillStyle = look.page;  // an edge, so that it stands out from an iteration of any colour
    pen.fillRect(x - 1.75, strip, 3.5, tall);
    pen.fillStyle = look.text;
    pen.fillRect(x - 0.75, strip - 2, 1.5, tall + 4);
    pen.beginPath();
    pen.moveTo(x - HALF, strip - TALL);
    pen.lineTo(x + HALF, strip - TALL);
    pen.lineTo(x, strip + 2);
    pen.fill();
  }
}

function ticksOf(marks) {
  const ticks = [];
  for (const { x, accepted, drafts } of marks) {
    const last = ticks[ticks.length - 1];
    if (last && x - last.x < QUIET_APART) { last.accepted += accepted; last.drafts += drafts; }
    else ticks.push({ x, accepted, drafts });
  }
  return ticks;
}

// Accepted drafts are its lower part, which is broad as well as of their hue, and those turned down the thin rest.
function drawTick({ pen, look }, { x, accepted, drafts }, strip) {
  const some = accepted && accepted < drafts, share = Math.round(TICK * accepted / drafts);
  const low = some ? Math.min(Math.max(share, 2), TICK - 2) : share, middle = Math.floor(x) + 0.5, bottom = strip + 5;
  const part = (from, to, wide, colour) => {
    pen.fillStyle = colour;
    pen.fillRect(middle - wide / 2, from, wide, to - from);
  };
  if (low < TICK) part(bottom - TICK - 1, bottom - low, THIN + 2, look.page);
  if (low) part(bottom - low - 1, bottom + 1, BROAD + 2, look.page);
  part(bottom - TICK, bottom - low, THIN, look.turned);
  part(bottom - low, bottom, BROAD, look.draft);
}

export function nameMarks(painter, { group }) {
  let near = [];
  const { look, pen, width } = painter;
  const name = () => {
    if (!near.length) return;
    const text = nameOf(near), last = width - 3 - look.width(pen, text);  // nothing is written past the right edge
    painter.aboveLanes(text, Math.min(near[0].x - HALF, last), look.text);
  };
  for (const mark of visibleMarks(painter, group).filter(isNamed)) {
    if (near.length && mark.x - near[0].x > TOGETHER) { name(); near = []; }
    near.push(mark);
  }
  name();
}

// One of many alike is named only where nothing is near.
function isNamed({ x, isQuiet }, at, marks) {
  if (!isQuiet) return true;
  return [marks[at - 1], marks[at + 1]].every((other) => !other || Math.abs(other.x - x) > QUIET_NAMED);
}

function nameOf(marks) {
  const names = marks.slice(0, NAMED).map(({ text }) => text).join(" · ");
  return marks.length > NAMED ? `${names} · ${marks.length - NAMED} more` : names;
}

// Left to right.
function visibleMarks(painter, group) {
  const marks = [], { texts } = painter.store;
  for (const { tables: { instant } } of group.lanes) {
    if (!instant) continue;
    painter.eachVisible(instant, (row, x) => {
      const name = texts[instant.name[row]];
      if (x >= GUTTER) marks.push({ x, ...markOf(name, texts[instant.note[row]] || "") });
    });
  }
  return marks.sort((one, other) => one.x - other.x);
}

// "pause story-3": whom it concerns, where the record begins with that; "3 of 8 drafts".
function markOf(name, note) {
  const [, accepted, drafts] = /^accepted=(\d+), drafts=(\d+)/.exec(note) || [];
  if (name === REWIND && drafts > 0) return { isQuiet: true, accepted: +accepted, drafts: +drafts, text: `${accepted} of ${drafts} drafts` };
  const [, requestId] = /^request_id=([^,]*)/.exec(note) || [];
  return { isQuiet: false, text: requestId ? `${name} ${requestId}` : name };
}
