// The switch between the modes: which one it is, which one is on its way, and what switching would do.
import { enable, make, makeButton, setAttribute, setText } from "./panel_make.js";
import { Hint } from "./panel_popover.js";

const MODES = ["legacy", "async"];

export class ModeSwitch {
  constructor(part) {
    this.part = part;
    this.view = {};
    this.buttons = new Map(MODES.map((mode) => [mode, makeButton(mode, "", () => this.choose(mode), { name: `mode ${mode}` })]));
    this.group = make("span", { className: "wb-modes", attributes: { role: "group", "aria-label": "Mode" } }, ...this.buttons.values());
    this.hint = new Hint(part, this.group);
  }

  choose(mode) { if (mode !== this.view.wanted_mode) this.part.command("set_mode", { mode }); }

  // By key: to the mode that it would not be in.
  toggle() {
    if (this.view.other_mode) this.choose(this.view.wanted_mode === this.view.mode ? this.view.other_mode : this.view.mode);
  }

  show(view) {
    this.view = view;
    const { mode, wanted_mode: wanted, can = {} } = view;
    for (const [name, button] of this.buttons) {
      const isComing = name === wanted && wanted !== mode;
      setAttribute(button, "aria-pressed", String(name === mode));
      setAttribute(button, "data-coming", isComing ? "true" : null);
      setAttribute(button, "aria-label", `mode ${name}${isComing ? ", from the next iteration on" : ""}`);
      setText(button, isComing ? `${name} …` : name);
      enable(button, can.set_mode);
    }
    this.hint.say(view.switch_text);
  }
}
