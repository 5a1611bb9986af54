// Any past iteration: a slider, and what is known of the one chosen on it.
import { enable, fillChildren, make, makeButton, setAttribute, setProperty, setText } from "./panel_make.js";

const PACE = 100;  // ms between two commands of a thumb that is dragged

export class HistoryPane {
  constructor(part) {
    this.part = part;
    this.isHeld = false;
    this.timer = 0;
    this.view = { first: 0, last: -1, chosen: null };
    this.slider = make("input", { type: "range", min: 0, max: 0, step: 1, attributes: { "aria-label": "Iteration" } });
    this.number = make("input", { type: "number", step: 1, className: "wb-count", attributes: { "aria-label": "Go to iteration" } });
    this.previous = makeButton("‹", "The iteration before", () => this.step(-1), { name: "Previous iteration" });
    this.next = makeButton("›", "The iteration behind", () => this.step(1), { name: "Next iteration" });
    this.newest = makeButton("Newest", "Follow the newest iteration", () => this.choose(null));
    this.title = make("div", { className: "wb-title" });
    this.why = make("p", { className: "wb-prose" });
    this.facts = make("dl", { className: "wb-facts" });
    this.watched = make("dl", { className: "wb-facts wb-watched" });
    this.watchedHead = make("div", { className: "wb-column-head", textContent: "watched, at its end" });
    this.table = make("table", { className: "wb-image" });
    this.tableHead = make("div", { className: "wb-column-head", textContent: "request table, at its end" });
    this.content = [
      make("div", { className: "wb-pane-head wb-slide" }, this.previous, this.slider, this.next, this.number, this.newest),
      make("div", { className: "wb-scroll", tabIndex: 0, attributes: { role: "region", "aria-label": "The chosen iteration" } }, this.title, this.why,
        make("div", { className: "wb-history" }, make("div", {}, this.facts, this.watchedHead, this.watched), make("div", { className: "wb-image-box" }, this.tableHead, this.table)))];
    this.listen();
  }

  isEmpty({ last }) { return last < 0; }

  listen() {
    const { slider, number } = this;
    slider.addEventListener("pointerdown", () => { this.isHeld = true; });
    for (const name of ["pointerup", "pointercancel", "blur"]) slider.addEventListener(name, () => { this.isHeld = false; });
    slider.addEventListener("input", () => this.slid());
    number.addEventListener("change", () => { if (number.value !== "" && number.reportValidity()) this.choose(number.valueAsNumber); });
    this.part.signal.addEventListener("abort", () => clearTimeout(this.timer));
  }

  // While it is dragged: the last place wins, and not each on the way is asked for.
  slid() {
    setProperty(this.number, "value", this.slider.value);
    if (this.timer) return;
    this.timer = setTimeout(() => {
      this.timer = 0;
      this.choose(this.slider.valueAsNumber);
    }, PACE);
  }

  choose(iteration) { this.part.command("choose", { iteration }); }

  get shown() { return this.view.chosen === null ? this.view.last : this.view.chosen; }

  step(by) { this.choose(Math.min(this.view.last, Math.max(this.view.first, this.shown + by))); }

  show(view) {
    this.view = view;
    for (const field of [this.slider, this.number]) {
      setProperty(field, "min", String(view.first));
      setProperty(field, "max", String(view.last));
    }
    if (!this.isHeld && !this.timer) this.showPlace();
    enable(this.previous, this.shown > view.first);
    enable(this.next, this.shown < view.last);
    setAttribute(this.newest, "aria-pressed", String(view.chosen === null));
    setText(this.title, view.title);
    setText(this.why, view.why);
    showFacts(this.facts, view.facts);
    showFacts(this.watched, view.watched);
    setProperty(this.watchedHead, "hidden", view.watched.length === 0);
    showTable(this.table, view.table);
    setProperty(this.tableHead, "hidden", view.table.length === 0);
  }

  showPlace() {
    setProperty(this.slider, "value", String(this.shown));
    setAttribute(this.slider, "aria-valuetext", `iteration ${this.shown} of ${this.view.first} to ${this.view.last}`);
    if (document.activeElement !== this.number) setProperty(this.number, "value", String(this.shown));
  }
}

function showFacts(list, facts) {
  fillChildren(list, facts, () => make("div", {}, make("dt"), make("dd")), (item, [name, value]) => {
    setText(item.firstChild, name);
    setText(item.lastChild, value);
  });
}

// A heading row first.
function showTable(table, rows) {
  fillChildren(table, rows, () => make("tr"), (line, cells, place) => {
    const name = place ? "TD" : "TH";
    if (line.firstChild && line.firstChild.nodeName !== name) line.replaceChildren();
    fillChildren(line, cells, () => make(name), (cell, text) => setText(cell, text));
  });
}
