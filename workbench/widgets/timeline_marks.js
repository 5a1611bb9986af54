// Moments that stand out: a row that paused or went on, a request that was evicted or aborted, a rewind. A flag on the strip of the
// iterations, named in the row of the axis where there is room.
import { GUTTER } from "./timeline_brush.js";

const HALF = 4.5, TALL = 6;  // of the flag, px
const TOGETHER = 60;  // marks nearer to the first of them than this have one name, px
const REWIND = "rewind";  // one an iteration with drafts: a tick without a flag
const QUIET_APART = 6, QUIET_NAMED = 90;  // px
const NAMED = 2;  // of those, the others are counted

export function drawMarks(painter, { group, strip }, tall) {
  const { pen, look } = painter;
  let quiet = -QUIET_APART;
  for (const { x, isQuiet } of visibleMarks(painter, group)) {
    if (isQuiet) {
      if (x - quiet < QUIET_APART) continue;
      quiet = x;
      pen.fillStyle = look.text;
      pen.fillRect(x - 0.5, strip - 3, 1, 4);
      continue;
    }
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
      if (x >= GUTTER) marks.push({ x, isQuiet: name === REWIND, text: markText(name, texts[instant.note[row]] || "") });
    });
  }
  return marks.sort((one, other) => one.x - other.x);
}

// "pause story-3": whom it concerns, where the record begins with that.
function markText(name, note) {
  const [, accepted, drafts] = /^accepted=(\d+), drafts=(\d+)/.exec(note) || [];
  if (name === REWIND && drafts) return `${accepted} of ${drafts} drafts`;
  const [, requestId] = /^request_id=([^,]*)/.exec(note) || [];
  return requestId ? `${name} ${requestId}` : name;
}
