// Boxes above everything, whatever scrolls or is clipped around them: forms that a button opens, and longer hints.
import { isEnabled, make, setText } from "./panel_make.js";

const GAP = 5, EDGE = 8;  // px

function placeBelow(box, anchor) {
  const { left, top, bottom } = anchor.getBoundingClientRect(), { offsetWidth: wide, offsetHeight: tall } = box;
  const fitsBelow = bottom + GAP + tall <= window.innerHeight - EDGE;
  box.style.left = `${Math.max(EDGE, Math.min(left, window.innerWidth - wide - EDGE))}px`;
  box.style.top = `${fitsBelow ? bottom + GAP : Math.max(EDGE, top - tall - GAP)}px`;
}

// A dialogue under its button. Escape and a click elsewhere close it, and the focus goes back to where it was.
export class Popover {
  constructor(part, opener, label, ...content) {
    this.opener = opener;
    this.box = make("div", { className: "wb-popover", popover: "auto", attributes: { role: "dialog", "aria-label": label } }, ...content);
    part.root.append(this.box);
    opener.popoverTargetElement = this.box;
    opener.setAttribute("aria-haspopup", "dialog");
    opener.addEventListener("click", (event) => { if (!isEnabled(opener)) event.preventDefault(); });
    this.box.addEventListener("beforetoggle", (event) => { if (event.newState === "open") this.aimFocus(); });
    this.box.addEventListener("toggle", (event) => this.toggled(event.newState === "open"));
    const follow = () => { if (this.isOpen) placeBelow(this.box, opener); };
    window.addEventListener("scroll", follow, { signal: part.signal, capture: true });
    window.addEventListener("resize", follow, { signal: part.signal });
  }

  get isOpen() { return this.box.matches(":popover-open"); }

  // The browser itself focuses the first field in the click that opens: "toggle" comes a task later, when the first
  // letter may have been typed already.
  aimFocus() {
    for (const old of this.box.querySelectorAll("[autofocus]")) old.autofocus = false;
    const first = this.box.querySelector("textarea, input, select, button");
    if (first) first.autofocus = true;
  }

  toggled(isOpen) {
    this.opener.setAttribute("aria-expanded", String(isOpen));
    if (isOpen) placeBelow(this.box, this.opener);
  }

  close() { if (this.isOpen) this.box.hidePopover(); }
}

// A sentence that shows while the pointer or the focus is on something.
export class Hint {
  constructor(part, anchor) {
    this.anchor = anchor;
    this.isWanted = false;
    this.text = "";
    this.box = make("div", { className: "wb-hint-box", popover: "manual", attributes: { role: "tooltip" } });
    part.root.append(this.box);
    for (const name of ["pointerenter", "focusin"]) anchor.addEventListener(name, () => this.want(true));
    for (const name of ["pointerleave", "focusout"]) anchor.addEventListener(name, () => this.want(false));
    anchor.addEventListener("keydown", (event) => { if (event.key === "Escape") this.want(false); });
  }

  say(text) {
    this.text = text || "";
    setText(this.box, this.text);
    this.want(this.isWanted);
  }

  want(isWanted) {
    this.isWanted = isWanted;
    const isShown = isWanted && this.text !== "";
    if (isShown !== this.box.matches(":popover-open")) this.box.togglePopover(isShown);
    if (isShown) placeBelow(this.box, this.anchor);
  }
}
