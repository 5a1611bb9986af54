// The bar's keys: while the pointer or the focus is in the panel, and no words are typed anywhere.

const EDITED = "[contenteditable]:not([contenteditable='false'])";
const WORDS = `textarea, ${EDITED}, input:not([type="checkbox"], [type="radio"], [type="range"], [type="button"], [type="submit"])`;
// Outside the panel nothing is taken from any field. Within it letters mean nothing to a switch, a thumb or a closed list.
const FIELDS = `input, select, ${WORDS}`;
const PRESSED = "button, summary, a[href], select, input[type='checkbox'], input[type='radio']";  // Space presses these

// `act(key)`: true if the key meant something. `tell(isTyping)`: whether keys go to an editor outside the panel.
export class PanelKeys {
  constructor(part, act, tell) {
    this.part = part;
    this.act = act;
    this.isOver = false;
    const { signal } = part;
    document.addEventListener("pointerover", (event) => { this.isOver = this.place().contains(event.target); }, { signal });
    document.addEventListener("pointerleave", () => { this.isOver = false; }, { signal });
    document.addEventListener("focusin", (event) => tell(this.isElsewhere(event.target)), { signal });
    document.addEventListener("focusout", (event) => tell(this.isElsewhere(event.relatedTarget)), { signal });
    document.addEventListener("click", (event) => this.clicked(event), { signal });
    // On the window and on the way down: before JupyterLab, whose own listener sits on the document.
    window.addEventListener("keydown", (event) => this.pressed(event), { signal, capture: true });
    tell(this.isElsewhere(document.activeElement));
  }

  place() { return this.part.whole(); }

  isElsewhere(focused) { return Boolean(focused) && focused.closest(WORDS) !== null && !this.place().contains(focused); }

  // A click on the panel takes the focus from an editor elsewhere, even where nothing is that could have it.
  clicked({ target }) {
    if (this.place().contains(target) && this.isElsewhere(document.activeElement)) this.part.rest();
  }

  pressed(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey || event.isComposing || !this.hears(event)) return;
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
    if (!this.act(key, event.repeat)) return;
    event.preventDefault();
    event.stopImmediatePropagation();
  }

  hears(event) {
    const focused = document.activeElement || document.body, panel = focused.closest(".wb-panel-whole, .wb-panel");
    if (!panel) return this.isOver && !focused.closest(FIELDS);
    if (!this.place().contains(focused) || focused.closest(WORDS) || isOpenList(focused)) return false;
    if (this.place().querySelector(".wb-popover:popover-open")) return false;  // a dialogue comes first
    return event.key !== " " || !focused.closest(PRESSED) || focused.closest("[aria-disabled='true']");
  }
}

// Letters choose in a list that is open; browsers that cannot tell have it closed.
function isOpenList(focused) { return CSS.supports("selector(:open)") && focused.matches("select:open"); }
