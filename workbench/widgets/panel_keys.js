// The bar's keys: while the pointer or the focus is in the panel, and nothing that takes keys of its own has the focus.

// Where letters are typed. The timeline's own keys come second: S steps, in the panel, and + and − zoom.
const TYPED = "input, textarea, select, [contenteditable]:not([contenteditable='false']), .wb-popover";
const PRESSED = "button, summary, a[href]";  // Space presses these

// `act(key)`: true if the key meant something.
export class PanelKeys {
  constructor(part, act) {
    this.part = part;
    this.act = act;
    this.isOver = false;
    this.held = new Set();
    const { signal } = part;
    const over = (event) => { this.isOver = this.place().contains(event.target); };
    document.addEventListener("pointerover", over, { signal });
    document.addEventListener("pointerleave", () => { this.isOver = false; }, { signal });
    // On the window and on the way down: before JupyterLab, whose own listener sits on the document.
    window.addEventListener("keydown", (event) => this.pressed(event), { signal, capture: true });
  }

  // The bar, or the box around it that the whole panel stands in.
  place() { return this.part.root.closest(".wb-panel-whole") || this.part.root; }

  pressed(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey || event.isComposing || !this.hears(event)) return;
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
    if (!this.act(key, event.repeat)) return;
    event.preventDefault();
    event.stopImmediatePropagation();
  }

  hears(event) {
    const focused = document.activeElement || document.body, panel = focused.closest(".wb-panel-whole, .wb-panel");
    if (!(panel ? this.place().contains(focused) : this.isOver)) return false;
    if (focused.matches(TYPED) || focused.closest(".wb-popover, [contenteditable]:not([contenteditable='false'])")) return false;
    return event.key !== " " || !focused.closest(PRESSED) || focused.closest("[aria-disabled='true']");
  }
}
