// Small forms: fields with labels, and what stands in them as arguments of a command.
import { enable, fillChildren, isEnabled, make, makeId, setAttribute, setProperty, setText } from "./panel_make.js";

// One field. `kind`: text, area, number, select or check; `hint` stands in it while it is empty.
function makeControl({ kind, name, hint = "", rows = 2, min, max, step, isWanted = false }) {
  const shared = { id: makeId(), name, autocomplete: "off", spellcheck: false };
  if (kind === "area") return make("textarea", { ...shared, rows, placeholder: hint, required: isWanted });
  if (kind === "select") return make("select", shared);
  if (kind === "check") return make("input", { ...shared, type: "checkbox" });
  const limits = kind === "number" ? { type: "number", min: min ?? "", max: max ?? "", step: step ?? 1 } : { type: "text" };
  return make("input", { ...shared, ...limits, placeholder: hint, required: isWanted });
}

export class Form {
  // `fields`: each with name, label and what makeControl takes; `send(values)` when it is handed in.
  // `done()` when what was asked has worked; `isReady(values)`: whether there is anything to hand in.
  constructor(fields, buttonText, send, { className = "", done = () => {}, isReady = () => true } = {}) {
    Object.assign(this, { done, isReady, asked: null, isAllowed: true });
    this.controls = new Map();
    this.error = make("div", { className: "wb-form-error", hidden: true, attributes: { role: "alert" } });
    this.button = make("button", { type: "submit", className: "wb-primary", textContent: buttonText });
    const places = fields.map((field) => this.makeField(field));
    this.form = make("form", { className: `wb-form ${className}` }, ...places, make("div", { className: "wb-form-end" }, this.button), this.error);
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (isEnabled(this.button)) send(this.values());
    });
    this.form.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.handIn(event);
    });
    this.form.addEventListener("input", () => { this.say(""); this.enable(); });
    this.enable();
  }

  enable(isAllowed = this.isAllowed) {
    this.isAllowed = isAllowed;
    enable(this.button, isAllowed && this.isReady(this.values()));
  }

  // Send a command whose answer is awaited here: what was refused stays filled in, with the reason under it.
  ask(part, name, args) {
    this.asked = name;
    this.say("");
    part.command(name, args);
  }

  hear({ command, level, text }) {
    if (!this.asked || command !== this.asked) return;
    this.asked = null;
    if (level === "error") this.say(text); else this.done();
  }

  say(text) {
    setText(this.error, text ? `✕ ${text}` : "");
    setProperty(this.error, "hidden", !text);
  }

  makeField(field) {
    const control = makeControl(field), label = make("label", { htmlFor: control.id, textContent: field.label });
    if (field.title) label.title = control.title = field.title;
    this.controls.set(field.name, { control, kind: field.kind });
    return make("div", { className: `wb-field wb-field-${field.kind} ${field.className || ""}` }, label, control);
  }

  // Ctrl+Enter in a field is ours; JupyterLab would run the cell.
  handIn(event) {
    event.preventDefault();
    event.stopPropagation();
    this.form.requestSubmit();
  }

  // null: left empty.
  values() {
    const valueOf = ({ control, kind }) => {
      if (kind === "check") return control.checked || null;
      if (control.value.trim() === "") return null;
      return kind === "number" ? control.valueAsNumber : control.value;
    };
    return Object.fromEntries([...this.controls].map(([name, field]) => [name, valueOf(field)]));
  }

  setOptions(name, options) { setOptions(this.controls.get(name).control, options); }

  clear() {
    this.form.reset();
    this.say("");
    this.enable();
  }
}

// [value, words] each; what is chosen stays chosen where it is still among them.
export function setOptions(select, options) {
  const chosen = select.value;
  fillChildren(select, options, () => make("option"), (option, [value, words]) => {
    setAttribute(option, "value", value);  // the property of an option without one is its words
    setText(option, words);
  });
  const isThere = options.some(([value]) => value === chosen);
  if (select.value !== chosen && isThere) select.value = chosen;
}
