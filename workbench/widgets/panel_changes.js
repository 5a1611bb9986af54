// What the phases of an iteration read and wrote: a card a phase.
import { countedKeys, enable, fillChildren, keepChildren, make, makeButton, makeId, setAttribute, setCutText, setProperty, setText } from "./panel_make.js";
import { makeSwatch, showColour, showHue } from "./panel_hues.js";

const WARNING = "Reading from the device waits for it, and voids the times of this iteration.";

export class ChangesPane {
  constructor(part) {
    this.part = part;
    this.title = make("span", { className: "wb-summary" });
    this.record = make("input", { type: "checkbox", id: makeId() });
    this.record.addEventListener("change", () => part.command("record_changes", { wanted: this.record.checked }));
    this.names = make("span", { className: "wb-choices" });
    this.value = make("pre", { className: "wb-device-value", tabIndex: 0, attributes: { "aria-label": "Value read from the device" } });
    this.device = make("div", { className: "wb-device" }, make("b", { textContent: "Read from the device" }), this.names, make("span", { className: "wb-warning", textContent: `⚠ ${WARNING}` }), this.value);
    this.hint = make("div", { className: "wb-empty" });
    this.cards = make("div", { className: "wb-cards" });
    this.chips = make("span", { className: "wb-choices", attributes: { role: "group", "aria-label": "Phases" } });
    this.newest = "";  // the card that was opened by itself
    this.content = [make("div", { className: "wb-pane-head" }, this.title, this.chips, make("label", { className: "wb-switch", htmlFor: this.record.id, title: "Note what each phase reads and writes; costs time, which voids it" }, this.record, "record changes")),
      this.scroll = make("div", { className: "wb-scroll", tabIndex: 0, attributes: { role: "region", "aria-label": "Phases and their values" } }, this.hint, this.cards, this.device)];
  }

  isEmpty() { return false; }  // its switch is wanted most while nothing is there

  show(view) {
    setCutText(this.title, view.title);
    setProperty(this.record, "checked", view.recording);
    setText(this.hint, view.cards.length ? "" : view.hint);
    setProperty(this.hint, "hidden", view.cards.length > 0 || !view.hint);
    const keys = countedKeys(view.cards, (card) => card.phase), cards = view.cards.map((card, place) => ({ ...card, key: keys[place] }));
    keepChildren(this.cards, cards, (card) => card.key, makeCard, showCard);
    fillChildren(this.chips, cards, () => this.makeChip(), (chip, card) => {
      setText(chip, card.phase);
      setProperty(chip, "title", `Show what ${card.phase} read and wrote`);
      showColour(chip, card.colour);
    });
    this.showDevice(view);
    this.showNewest(view.iteration, cards.length);
  }

  makeChip() {
    const chip = makeButton("", "", () => this.scrollTo([...this.chips.children].indexOf(chip)), { name: "", className: "wb-small wb-phase-chip" });
    chip.removeAttribute("aria-label");  // its words are its name
    return chip;
  }

  scrollTo(place) {
    const card = this.cards.children[place];
    if (card) this.scroll.scrollTop += card.getBoundingClientRect().top - this.scroll.getBoundingClientRect().top;
  }

  // The phase that ran last comes into view as it comes; a person may scroll away from it until the next.
  showNewest(iteration, count) {
    const newest = `${iteration} ${count}`;
    if (newest === this.newest) return;
    this.newest = newest;
    this.scrollTo(count - 1);
  }

  showDevice({ device_values: names, device_value: value }) {
    keepChildren(this.names, names, (name) => name, (name) => makeButton(name, `Read ${name}. ${WARNING}`, () => this.part.command("read_device", { name }), { name: `Read ${name} from the device`, className: "wb-small wb-code" }), (button) => enable(button, true));
    setProperty(this.device, "hidden", names.length === 0 && !value);
    setText(this.value, value);
    setProperty(this.value, "hidden", !value);
  }
}

function makeColumn(name) { return make("div", { className: "wb-column" }, make("div", { className: "wb-column-head", textContent: name }), make("ul")); }

function makeCard() {
  return make("article", { className: "wb-card" }, make("h4"), make("div", { className: "wb-columns" }, makeColumn("read"), makeColumn("wrote")),
    make("div", { className: "wb-enqueued" }, make("span", { className: "wb-column-head", textContent: "enqueued" }), make("span", { className: "wb-code" })));
}

function showCard(card, { phase, colour, read, wrote, enqueued }) {
  const [head, columns, launched] = card.children;
  setText(head, phase);
  showColour(head, colour);
  setAttribute(card, "aria-label", phase);
  showValues(columns.children[0].lastChild, read, true);
  showValues(columns.children[1].lastChild, wrote, false);
  setText(launched.lastChild, enqueued.join(", "));
  setProperty(launched, "hidden", enqueued.length === 0);
}

function showValues(list, values, isRead) {
  const keys = countedKeys(values, ({ name, request_id: request }) => `${name} ${request}`);
  const keyed = values.map((value, place) => ({ ...value, key: keys[place] }));
  keepChildren(list, keyed, (value) => value.key, makeValue, (item, value) => showValue(item, value, isRead));
  setAttribute(list, "data-empty", values.length ? null : "true");
}

function makeValue() {
  const span = (className, ...children) => make("span", { className }, ...children);
  return make("li", {}, span("wb-value-name"), span("wb-value-of", makeSwatch(), span("wb-value-who")),
    span("wb-value", span("wb-old"), span("wb-arrow", " → "), span("wb-new"), span("wb-note")));
}

// Stale: something read that means nothing any more, or something replaced that meant nothing.
function showValue(item, value, isRead) {
  const [name, { children: [swatch, who] }, { children: [old, arrow, fresh, note] }] = item.children;
  setText(name, value.name);
  setAttribute(item, "data-everybody", value.request_id ? null : "true");
  showHue(swatch, value.hue);
  setCutText(who, value.request_id);
  setText(old, value.old);
  setText(fresh, value.new);
  setProperty(arrow, "hidden", value.old === "");
  const stale = value.is_stale ? "true" : null;
  setAttribute(isRead ? fresh : old, "data-stale", stale);
  setText(note, [value.is_stale ? "stale" : "", value.note].filter(Boolean).join(", "));
}
