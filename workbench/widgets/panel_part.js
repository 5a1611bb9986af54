// What the bar and the panes have in common: a root in the notebook's theme that sends commands and follows traits.
import { Look } from "./timeline_look.js";
import { make, setAttribute } from "./panel_make.js";
import { setHues } from "./panel_hues.js";

// Events by which the bar tells the panes what came to it: what commands had to say, and in a run the rows that run.
export const NOTICE = "wb-notice", ROWS = "wb-rows";
const SHORTCUTS_MARK = "data-lm-suppress-shortcuts";  // JupyterLab takes no key from inside an element that has it
const PLAIN_COLOURS = { phases: {}, orders: {}, batchOf: {} };  // those of phases and orders come with the views

export class Part {
  constructor(model, el, className, label) {
    this.model = model;
    this.stop = new AbortController();
    this.signal = this.stop.signal;
    this.watched = [];
    this.repainted = [];  // called when the theme changed
    this.root = make("div", { className: `wb-panel ${className}`, tabIndex: -1, attributes: { role: "group", "aria-label": label } });
    el.append(this.root);
    this.look = new Look(this.root, PLAIN_COLOURS);
    setHues(this.root, this.look.isDark);
    this.watchTheme();
    this.keepFocus();
    this.shieldKeys();
  }

  command(name, args = {}) { this.model.send({ kind: "command", name, args }); }

  // This widget, or the box around it that the whole panel stands in.
  whole() { return this.root.closest(".wb-panel-whole") || this.root; }

  tell(event, detail) { this.root.dispatchEvent(new CustomEvent(event, { bubbles: true, detail })); }

  // Call `use` with what parts of this panel tell.
  hear(event, use) {
    document.addEventListener(event, (told) => { if (this.whole().contains(told.target)) use(told.detail); }, { signal: this.signal });
  }

  // Call `use` with a trait now and whenever it changes.
  follow(trait, use) {
    const changed = () => use(this.model.get(trait));
    this.model.on(`change:${trait}`, changed);
    this.watched.push([`change:${trait}`, changed]);
    changed();
  }

  recolour() {
    this.look.refresh();
    setHues(this.root, this.look.isDark);
    for (const use of this.repainted) use();
  }

  watchTheme() {
    const recolour = () => this.recolour();
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour, { signal: this.signal });
    this.themes = new MutationObserver(recolour);
    for (const place of [document.body, document.documentElement]) {
      this.themes.observe(place, { attributes: true, attributeFilter: ["class", "style", "data-jp-theme-name", "data-vscode-theme-id"] });
    }
    this.sizes = new ResizeObserver(() => { if (!this.look.isKnown) recolour(); });
    this.sizes.observe(this.root);
  }

  // A click leaves the focus on the panel and not on the button: so that Space, which presses a focused button, pauses
  // the run that a click on Run began. Whoever comes by Tab has buttons as everywhere.
  keepFocus() {
    this.root.addEventListener("mousedown", (event) => {
      if (!event.target.closest("button") || event.target.closest(".wb-popover")) return;
      event.preventDefault();
      this.rest();
    }, { signal: this.signal });
  }

  // The focus on the panel itself.
  rest() { this.root.focus({ preventScroll: true }); }

  // Plain keys pressed in here are ours alone: JupyterLab would take D, D for "delete the cell". The mark keeps out
  // shortcuts that are looked for on the way down, before any element hears of the key; stopping the event those of
  // pages that listen on the way up. With Ctrl, Alt or Meta keys go on, so that Ctrl+S saves the notebook.
  shieldKeys() {
    setAttribute(this.root, SHORTCUTS_MARK, "true");
    this.root.addEventListener("keydown", (event) => {
      if (!event.ctrlKey && !event.metaKey && !event.altKey) event.stopPropagation();
    }, { signal: this.signal });
    window.addEventListener("keydown", (event) => {
      if (!this.root.contains(event.target)) return;
      setAttribute(this.root, SHORTCUTS_MARK, event.ctrlKey || event.metaKey || event.altKey ? null : "true");
    }, { signal: this.signal, capture: true });
  }

  destroy() {
    this.stop.abort();
    this.themes.disconnect();
    this.sizes.disconnect();
    for (const [event, use] of this.watched) this.model.off(event, use);
    this.root.remove();
  }
}
