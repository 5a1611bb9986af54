// Colours, hatches and letters. Page colours come from the notebook's theme by way of timeline.css, those of phases and
// orders from Python, which has them once for NVTX, reports and widgets.
import { NONE } from "./timeline_table.js";

const FACE = "system-ui, 'DejaVu Sans', sans-serif";
export const FONT = `11px ${FACE}`, BOLD = `600 11px ${FACE}`;
const NAMES = ["page", "text", "soft", "line", "lane", "accent", "bubble", "wait", "now", "ranks", "dummy", "draft", "turned"];

// Relative luminance of 0xRRGGBB parts, as the contrast rules of WCAG count it.
function luminance(red, green, blue) {
  const [r, g, b] = [red, green, blue].map((part) => {
    const share = part / 255;
    return share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

// Black or white: whichever stands out more.
export function inkOn(hex) {
  const value = parseInt(hex.slice(1), 16);
  const light = luminance(value >> 16, (value >> 8) & 255, value & 255);
  return (light + 0.05) / 0.05 > 1.05 / (light + 0.05) ? "#000000" : "#ffffff";
}

export class Look {
  constructor(root, palette) {
    this.root = root;
    this.phases = palette.phases;
    this.orders = palette.orders;
    this.batchOf = palette.batchOf;
    this.dummies = new Set(palette.dummies);
    this.ranksWait = palette.ranksWait;
    this.widths = new Map();
    this.inks = new Map();
    this.probe = document.createElement("i");
    this.probe.hidden = true;
    root.append(this.probe);
    this.refresh();
  }

  // Read the theme anew: the page's own colour decides whether it is a light or a dark one.
  refresh() {
    this.isKnown = this.root.isConnected;  // a notebook may put us on its page only after we are made
    const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    pen.fillStyle = this.resolved("page");
    pen.fillRect(0, 0, 1, 1);
    const [red, green, blue] = pen.getImageData(0, 0, 1, 1).data;
    this.isDark = luminance(red, green, blue) < 0.18;
    this.root.dataset.theme = this.isDark ? "dark" : "light";
    for (const name of NAMES) this[name] = this.resolved(name);
    this.hatches = new Map();
  }

  // A colour of timeline.css as a canvas takes it: worked out, where the style sheet mixes colours or has two of them.
  resolved(name) {
    this.probe.style.color = `var(--wb-${name})`;
    return getComputedStyle(this.probe).color;
  }

  phase(name) { return this.phases[name] || this.phases.other; }
  order(name) { return this.orders[name] || this.phases.other; }

  // Work without a colour of its own takes that of its lane's kind, or of the phase around it.
  work(name, lane, phase) {
    if (this.phases[name]) return this.phases[name];
    return lane === "copy" ? this.phases.copy : this.phase(phase);
  }

  // What lies under a hatch: a wait for other ranks has a colour of its own.
  under(name) { return name === "ranks" ? this.phase(this.ranksWait) : this.lane; }

  ink(hex) {
    if (!this.inks.has(hex)) this.inks.set(hex, inkOn(hex));
    return this.inks.get(hex);
  }

  // Width of a text in FONT.
  width(pen, text) {
    if (!this.widths.has(text)) {
      if (this.widths.size > 5000) this.widths.clear();
      this.widths.set(text, pen.measureText(text).width);
    }
    return this.widths.get(text);
  }

  // Diagonal lines as a fill, drawn at the screen's own resolution so that they stay sharp.
  hatch(pen, name) {
    const scale = window.devicePixelRatio || 1, key = `${name} ${scale}`;
    if (!this.hatches.has(key)) this.hatches.set(key, lines(pen, this[name], scale));
    return this.hatches.get(key);
  }
}

function lines(pen, colour, scale) {
  const size = Math.round(7 * scale), tile = document.createElement("canvas"), tilePen = tile.getContext("2d");
  tile.width = tile.height = size;
  tilePen.strokeStyle = colour;
  tilePen.lineWidth = Math.max(1, 1.2 * scale);
  tilePen.beginPath();
  for (const shift of [-size, 0, size]) { tilePen.moveTo(shift - 1, size + 1); tilePen.lineTo(shift + size + 1, -1); }
  tilePen.stroke();
  const pattern = pen.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / scale));
  return pattern;
}

// The colours of a table's rows by the number of their name, looked up once a name.
export class RowColours {
  constructor(store, look, lane) { Object.assign(this, { store, look, lane, known: [] }); }

  of(table, row) {
    const name = table.name[row];
    if (this.known[name]) return this.known[name];
    const { texts } = this.store, phase = table.phase[row];
    const colour = this.look.work(texts[name], this.lane.name, phase === NONE ? "other" : texts[phase]);
    if (this.look.phases[texts[name]] || this.lane.name === "copy") this.known[name] = colour;
    return colour;
  }
}
