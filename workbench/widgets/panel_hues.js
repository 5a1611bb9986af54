// Twelve hues for requests, and letters beside them: nobody needs to tell colours apart.
import { inkOn } from "./timeline_look.js";
import { make, setAttribute, setProperty, setStyle, setText } from "./panel_make.js";

// Chosen by a search for twelve that stay apart for normal, protan, deutan and tritan sight and stand out from
// the page about 3:1; tests/unit/workbench/widgets/test_panel_hues.py measures both.
export const HUES = {
  light: ["#0098F1", "#E86A29", "#277868", "#CF6AB9", "#2444A9", "#83986E", "#832270", "#A05125", "#7A5DC7", "#3A451B", "#071368", "#4D0B05"],
  dark: ["#10C7FF", "#EEB819", "#98CC92", "#FA77BB", "#6494F2", "#7DA825", "#C35669", "#6AFCE6", "#885FD3", "#DBEE88", "#7A6A25", "#4B7C9E"],
};
const LETTERS = "ABCDEFGHIJKL";

export function hueLetter(hue) { return hue < 0 ? "" : LETTERS[hue % LETTERS.length]; }

// As custom properties of an element, for its style sheet: --wb-hue-3 and the letters' colour on it, --wb-ink-3.
export function setHues(root, isDark) {
  HUES[isDark ? "dark" : "light"].forEach((hex, place) => {
    root.style.setProperty(`--wb-hue-${place}`, hex);
    root.style.setProperty(`--wb-ink-${place}`, inkOn(hex));
  });
}

export function makeSwatch() { return make("i", { className: "wb-swatch", attributes: { "aria-hidden": "true" } }); }

// -1: nobody's.
export function showHue(swatch, hue) {
  setText(swatch, hueLetter(hue));
  setProperty(swatch, "hidden", hue < 0);
  if (hue >= 0) paintWith(swatch, `var(--wb-hue-${hue})`, `var(--wb-ink-${hue})`);
}

// Of a phase or an order, which have their colours from Python.
export function showColour(node, hex) { if (/^#[0-9a-f]{6}$/i.test(hex)) paintWith(node, hex, inkOn(hex)); }

function paintWith(node, fill, ink) {
  setStyle(node, "--wb-fill", fill);
  setStyle(node, "--wb-ink", ink);
  setAttribute(node, "data-painted", "true");
}
