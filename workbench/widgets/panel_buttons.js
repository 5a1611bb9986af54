// The control bar's buttons: one command each.
import { enable, isEnabled, make, makeButton, setAttribute, setProperty, setText } from "./panel_make.js";
import { NOTICE } from "./panel_part.js";
import { Popover } from "./panel_popover.js";
import { Form, setOptions } from "./panel_form.js";

const ICONS = {  // paths in a square of 16
  step_phase: "M3 3l7 5-7 5zM11.5 3h1.6v10h-1.6z",
  step: "M2 3l5 5-5 5zM7 3l5 5-5 5zM12.6 3h1.6v10h-1.6z",
  run: "M4 2.5l9 5.5-9 5.5z",
  pause: "M4 3h3v10H4zM9 3h3v10H9z",
};
const PACES = [[0, "full speed"], [20, "20 steps/s"], [5, "5 steps/s"], [1, "1 step/s"]];  // a step is an iteration
const CONFIRM_FOR = 4000;  // ms in which a second click resets
const KEY_NAMES = { " ": "Space" };

function makeIcon(path) {
  const make_ = (name) => document.createElementNS("http://www.w3.org/2000/svg", name);
  const icon = make_("svg"), shape = make_("path");
  for (const [name, value] of Object.entries({ viewBox: "0 0 16 16", width: "12", height: "12", "aria-hidden": "true" })) icon.setAttribute(name, value);
  shape.setAttribute("d", path);
  shape.setAttribute("fill", "currentColor");
  icon.append(shape);
  return icon;
}

export class Buttons {
  constructor(part) {
    this.part = part;
    this.byCommand = new Map();
    this.row = make("div", { className: "wb-controls", attributes: { role: "toolbar", "aria-label": "Session controls" } });
    this.row.append(this.driveGroup(), this.paceField());
    this.tail = this.tailGroup();
  }

  add(command, text, title, act = () => this.part.command(command)) {
    const button = makeButton(text, title, act);
    button.dataset.command = command;
    if (ICONS[command]) button.prepend(makeIcon(ICONS[command]));
    this.byCommand.set(command, [...(this.byCommand.get(command) || []), button]);
    return button;
  }

  driveGroup() {
    this.count = make("input", { type: "number", min: 1, step: 1, placeholder: "all", className: "wb-count", title: "How many iterations Run runs; empty: until nothing is left to do", attributes: { "aria-label": "Iterations to run; empty: all" } });
    this.count.addEventListener("keydown", (event) => { if (event.key === "Enter") this.runCounted(); });
    this.runButton = this.add("run", "Run", "Run iterations in the background", () => this.run());
    return make("span", { className: "wb-group" },
      this.add("step_phase", "Phase", "Run the next phase and stand behind it"),
      this.add("step", "Step", "Run to the end of the iteration"),
      make("span", { className: "wb-joined" }, this.runButton, this.count),
      this.add("pause", "Pause", "Stand still behind the iteration that runs"),
      this.untilButton());
  }

  // From the field: the focus goes on to the panel, so that Space pauses.
  runCounted() {
    if (!isEnabled(this.runButton) || !this.count.reportValidity()) return;
    this.run();
    this.part.rest();
  }

  run() {
    if (!this.count.reportValidity()) return;
    this.part.command("run", { n: this.count.value === "" ? null : this.count.valueAsNumber });
  }

  untilButton() {
    const button = makeButton("Until…", "Run to a phase, or until an expression is true", () => {}, { name: "Until" });
    const close = () => this.until.close();
    this.phases = make("div", { className: "wb-choices" });
    const form = new Form([{ kind: "text", name: "expression", label: "until this is true", hint: "s.row(0).output_tokens >= 8", isWanted: true, className: "wb-code", title: "A Python expression of s, the session" }], "Run until", (values) => form.ask(this.part, "run_until", values), { done: close });
    this.part.hear(NOTICE, (notice) => form.hear(notice));
    this.untilForm = form;
    this.until = new Popover(this.part, button, "Run until", make("div", { className: "wb-title", textContent: "Run to the next …" }), this.phases, form.form);
    this.untilOpener = button;
    return button;
  }

  setPhases(names) {
    this.byCommand.delete("run_to");
    this.phases.replaceChildren(...names.map((name) => this.add("run_to", name, `Run until ${name} comes next`, () => this.untilForm.ask(this.part, "run_to", { phase: name }))));
  }

  paceField() {
    this.pace = make("select", { className: "wb-pace", title: "How fast Run goes; a step is an iteration", attributes: { "aria-label": "Pace" } });
    this.pace.addEventListener("change", () => {
      this.part.command("set_pace", { per_s: Number(this.pace.value) });
      if (!this.pace.matches(":focus-visible")) this.part.rest();
    });
    return make("span", { className: "wb-group" }, this.pace);
  }

  showPace(per_s) {
    const others = PACES.some(([value]) => value === per_s) ? [] : [[per_s, `${per_s} steps/s`]];
    setOptions(this.pace, [...PACES, ...others].map(([value, words]) => [String(value), words]));
    setProperty(this.pace, "value", String(per_s));
  }

  tailGroup() {
    const submit = this.add("submit", "Submit…", "Hand in a request", () => {});
    const save = this.add("save", "Save…", "Keep the run in a folder", () => {});
    this.submitForm = submitForm((values) => this.submitForm.ask(this.part, "submit", values), () => this.submit.close());
    this.submit = new Popover(this.part, submit, "Submit a request", this.submitForm.form);
    const folder = new Form([{ kind: "text", name: "folder", label: "folder", hint: "runs/mine", isWanted: true, className: "wb-code" }], "Save", (values) => folder.ask(this.part, "save", values), { done: () => this.save.close() });
    this.part.hear(NOTICE, (notice) => { for (const form of [this.submitForm, folder]) form.hear(notice); });
    this.saveButton = save;
    this.save = new Popover(this.part, save, "Save the run", folder.form);
    const restart = this.asking("restart", "Restart", "Start over with the same requests, seeds and arrivals", "drop outputs, trace and history and start over");
    const reset = this.asking("reset", "Reset", "Drop requests, trace and history; breakpoints stay", "drop requests, trace and history");
    this.recoverButton = this.add("recover", "Recover", "Go on after the failed iteration; no token is lost or changed");
    return make("span", { className: "wb-group wb-tail" }, submit, restart, reset, this.recoverButton, save);
  }

  // A button whose first click asks; the second one within a few seconds does it.
  asking(command, text, title, loss) {
    const button = this.add(command, text, `${title}. Asks once`, () => {
      if (button.dataset.asks) { calm(); this.part.command(command); return; }
      button.dataset.asks = "true";
      name("Sure?", `Click again to ${loss}`);
      timer = setTimeout(calm, CONFIRM_FOR);
    });
    let timer = 0;
    const name = (words, told) => {
      setText(button, words);
      setAttribute(button, "aria-label", words === text ? text : `${words} ${told}`);
      setProperty(button, "title", told);
    };
    const calm = () => {
      clearTimeout(timer);
      delete button.dataset.asks;
      name(text, `${title}. Asks once`);
    };
    button.addEventListener("blur", calm);
    return button;
  }

  show({ can = {}, state, iterations }) {
    for (const [command, buttons] of this.byCommand) for (const button of buttons) enable(button, can[command]);
    this.untilForm.enable(Boolean(can.run_until));
    setProperty(this.saveButton, "title", can.save ? "Keep the run in a folder" : iterations ? "Saving waits for the end of the iteration in hand: Step (S)" : "Nothing to save yet: run an iteration");
    enable(this.untilOpener, can.run_until || can.run_to);
    setProperty(this.pace, "disabled", !can.set_pace);
    setProperty(this.recoverButton, "hidden", state !== "failed");
  }

  // Their keys, in a small box behind the words and in the title.
  nameKeys(keys) {
    for (const [key, command] of Object.entries(keys)) {
      const [button] = this.byCommand.get(command) || [], name = KEY_NAMES[key] || key.toUpperCase();
      if (!button || button.dataset.key) continue;
      button.dataset.key = key;
      button.title += ` (${name})`;
      button.setAttribute("aria-keyshortcuts", name);
      button.append(make("kbd", { textContent: name, attributes: { "aria-hidden": "true" } }));
    }
  }
}

function submitForm(send, done) {
  const fields = [
    { kind: "area", name: "prompt", label: "prompt", rows: 3, isWanted: true, hint: "Once upon a time" },
    { kind: "number", name: "max_tokens", label: "max tokens", min: 1, hint: "default", title: "max_tokens: tokens of output at most" },
    { kind: "number", name: "temperature", label: "temperature", min: 0, step: "any", hint: "0: greedy" },
    { kind: "number", name: "seed", label: "seed", min: 0, hint: "none" },
    { kind: "area", name: "stop", label: "stop texts, one a line", rows: 2, hint: "\\n is a new line" },
  ];
  const stops = (text) => (text === null ? null : text.split("\n").filter((line) => line !== "").map((line) => line.replaceAll("\\n", "\n")));
  return new Form(fields, "Submit", (values) => send({ ...values, stop: stops(values.stop) }), { className: "wb-submit-form", done });
}
