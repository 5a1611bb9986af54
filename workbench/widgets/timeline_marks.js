// Moments that stand out: a row that paused or went on, a request that was evicted or aborted. A flag on the strip of the
// iterations, named in the row of the axis where there is room.
import { GUTTER } from "./timeline_brush.js";

const HALF = 4.5, TALL = 6;  // of the flag, px
const TOGETHER = 60;  // marks nearer to the first of them than this have one name, px
const NAMED = 2;  // of those, the others are counted

export function drawMarks(painter, { group, strip }, tall) {
  const { pen, look } = painter;
  for (const { x } of visibleMarks(painter, group)) {
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
  for (const mark of visibleMarks(painter, group)) {
    if (near.length && mark.x - near[0].x > TOGETHER) { name(); near = []; }
    near.push(mark);
  }
  name();
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
      if (x >= GUTTER) marks.push({ x, text: markText(texts[instant.name[row]], texts[instant.note[row]] || "") });
    });
  }
  return marks.sort((one, other) => one.x - other.x);
}

// "pause story-3": whom it concerns, where the record begins with that.
function markText(name, note) {
  const [, requestId] = /^request_id=([^,]*)/.exec(note) || [];
  return requestId ? `${name} ${requestId}` : name;
}
