// Breakpoints: those there are, and a form for one more.
import { keepChildren, make, makeButton, setAttribute, setClass, setProperty, setText } from "./panel_make.js";
import { NOTICE } from "./panel_part.js";
import { Form } from "./panel_form.js";

const FIELDS = [
  { kind: "select", name: "phase", label: "before phase" },
  { kind: "text", name: "request", label: "for request", hint: "any" },
  { kind: "select", name: "reason", label: "order's reason" },
  { kind: "number", name: "bubble_us", label: "bubble longer than, µs", min: 0, step: "any", hint: "any" },
  { kind: "check", name: "graph_miss", label: "graph miss", title: "The forward runs eagerly although graphs are captured" },
  { kind: "text", name: "when", label: "when this is true", hint: "s.row(0).output_tokens >= 8", className: "wb-code wb-wide", title: "A Python expression of s, the session" },
];

export class StopsPane {
  constructor(part) {
    this.part = part;
    this.form = new Form(FIELDS, "Add breakpoint", (values) => this.form.ask(part, "break_on", values), {
      className: "wb-stop-form", done: () => this.form.clear(), isReady: (values) => Object.values(values).some((value) => value !== null),
    });
    this.form.button.title = "Name a phase, a request, a reason, a bubble, a graph miss or a condition first";
    part.hear(NOTICE, (notice) => this.form.hear(notice));
    this.list = make("ul", { className: "wb-stops", attributes: { "aria-label": "Breakpoints" } });
    this.hint = make("div", { className: "wb-empty" });
    this.content = [make("div", { className: "wb-scroll", tabIndex: 0, attributes: { role: "region", "aria-label": "Breakpoints" } }, this.form.form, this.hint, this.list)];
  }

  isEmpty() { return false; }  // its form is wanted most while nothing is there

  show({ rows, phases, reasons, hint }) {
    this.form.setOptions("phase", [["", "any"], ...phases.map((name) => [name, name])]);
    this.form.setOptions("reason", [["", "any"], ...reasons]);
    this.form.enable();
    setText(this.hint, rows.length ? "" : hint);
    setProperty(this.hint, "hidden", rows.length > 0 || !hint);
    keepChildren(this.list, rows, ({ id }) => id, ({ id }) => this.makeStop(id), showStop);
  }

  makeStop(id) {
    const box = make("input", { type: "checkbox" });
    box.addEventListener("change", () => this.part.command("enable_stop", { id, enabled: box.checked }));
    const text = make("span", { className: "wb-stop-text" }), number = make("b", { textContent: `#${id}` });
    const remove = makeButton("Remove", `Remove breakpoint ${id}`, () => this.part.command("remove_stop", { id }), { name: `Remove breakpoint ${id}`, className: "wb-small" });
    return make("li", {}, make("label", {}, box, number, text), make("span", { className: "wb-hit", textContent: "● stands here" }), make("span", { className: "wb-number wb-hits" }), remove);
  }
}

function showStop(item, { text, enabled, hits, is_hit: isHit }) {
  const [label, mark, count] = item.children, [box, , words] = label.children;
  setProperty(box, "checked", enabled);
  setProperty(label, "title", `${enabled ? "Enabled" : "Disabled"}: ${text}`);
  setText(words, text);
  setProperty(mark, "hidden", !isHit);
  setText(count, `${hits.toLocaleString("en")} ${hits === 1 ? "hit" : "hits"}`);
  setClass(item, "wb-is-hit", isHit);
  setAttribute(item, "data-enabled", String(enabled));
}
