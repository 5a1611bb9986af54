// The control bar's front-end. Traits come from workbench/widgets/panel_bar.py; what is sent is Command of
// workbench/panel/messages.py.
import { keepChildren, make, setAttribute, setCutText, setProperty, setText } from "./panel_make.js";
import { CARRIED } from "./timeline_carried.js";
import { NOTICE, Part, ROWS } from "./panel_part.js";
import { PanelKeys } from "./panel_keys.js";
import { Buttons } from "./panel_buttons.js";
import { ModeSwitch } from "./panel_mode.js";
import { NoticeLine } from "./panel_notice.js";
import { Strip } from "./panel_strip.js";

const STATE_MARKS = { running: "▶", paused: "❚❚", finished: "✓", failed: "✕", closed: "○" };
const IN_FIELDS = new Set(["bar", "strip"]);  // traits of which only the fields that have changed are carried
const REST = "Keys work while the pointer or the focus is in the panel.";

class Bar extends Part {
  constructor(model, el) {
    super(model, el, "wb-panel-bar", "Session");
    this.buttons = new Buttons(this);
    this.modes = new ModeSwitch(this);
    this.notice = new NoticeLine(REST);
    this.strip = new Strip();
    this.buttons.row.append(make("span", { className: "wb-group" }, this.modes.group));
    this.root.prepend(this.head(), this.buttons.row, make("div", { className: "wb-second" }, this.notice.line, this.buttons.tail), this.notice.detail, this.strip.box);
    this.keys = new PanelKeys(this, (key, isRepeat) => this.pressed(key, isRepeat), (isTyping) => this.notice.tellTyping(isTyping));
    this.follow("phases", (names) => this.buttons.setPhases(names));
    this.follow("key_map", (keys) => this.buttons.nameKeys(keys));
    this.follow("pace", (per_s) => this.buttons.showPace(per_s));
    this.follow("notice", (notice) => { this.notice.hear(notice); this.tell(NOTICE, notice); });
    this.follow("rows", (news) => this.tell(ROWS, news));
    this.follow("strip", (view) => this.strip.show(view));
    this.follow("bar", (view) => this.show(view));
    this.hear(CARRIED, (traits) => {
      for (const [name, value] of Object.entries(traits)) model.set(name, IN_FIELDS.has(name) ? { ...model.get(name), ...value } : value);
    });
    this.root.panelBar = this;
  }

  head() {
    this.state = make("span", { className: "wb-state" }, make("span", { attributes: { "aria-hidden": "true" } }), make("span"));
    this.headline = make("span", { className: "wb-headline" });
    this.setup = make("span", { className: "wb-setup" });
    this.badges = make("ul", { className: "wb-badges", attributes: { "aria-label": "Warnings" } });
    return make("div", { className: "wb-head" },
      this.state, this.headline, this.badges, this.setup);
  }

  show(view) {
    const { state = "closed", badges = [] } = view;
    setAttribute(this.state, "data-state", view.state || null);
    setText(this.state.firstChild, view.state ? STATE_MARKS[state] : "");
    setText(this.state.lastChild, view.state || "…");
    setCutText(this.headline, view.headline);
    this.notice.age(view);
    setText(this.setup, setupText(view));
    setProperty(this.setup, "title", setupTitle(view));
    keepChildren(this.badges, badges, ({ text }) => text, () => make("li", { tabIndex: 0 }), (item, { text, title }) => {
      setText(item, text);
      setProperty(item, "title", title);
      setAttribute(item, "aria-label", `${text}: ${title}`);
    });
    this.buttons.show(view);
    this.modes.show(view);
  }

  // A key: what the button of its command would do. True if it is one of ours, whether or not it does something now.
  pressed(key, isRepeat) {
    const command = this.model.get("key_map")[key];
    if (!command) return false;
    if (isRepeat || !(this.model.get("bar").can || {})[command]) return true;
    if (command === "run") this.buttons.run();
    else if (command === "set_mode") this.modes.toggle();
    else this.command(command);
    return true;
  }
}

function setupText({ model, device, clock, iterations }) {
  if (!model) return "";
  return [model, device, `clock ${clock}`, `${iterations.toLocaleString("en")} begun`].join(" · ");
}

// The virtual clock is what a newcomer has not met yet.
function setupTitle(view) {
  const isVirtual = (view.clock || "").startsWith("virtual");
  const clock = isVirtual ? "\nThe virtual clock counts the seconds that the engine ran by itself: thinking, stepping by hand and idling take none. Arrivals go by it." : "";
  return `${setupText(view)}${clock}`;
}

export default {
  render({ model, el }) {
    const bar = new Bar(model, el);
    return () => bar.destroy();
  },
};
