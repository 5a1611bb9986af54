// Plain keys pressed in here are ours alone: JupyterLab would take D, D for "delete the cell" and M for "make it text".
// With Ctrl, Alt or Meta, and Shift+Enter, they go on: one saves and runs as everywhere.

const MARK = "data-lm-suppress-shortcuts";  // JupyterLab takes no key from an element that has it

export function shieldKeys(root, signal) {
  const places = () => root.querySelectorAll("canvas, button");
  for (const place of places()) place.setAttribute(MARK, "true");
  root.addEventListener("keydown", (event) => {
    if (event.key === "Tab") return;
    if (!event.ctrlKey && !event.metaKey && !event.altKey && !(event.shiftKey && event.key === "Enter")) {
      event.stopPropagation();
      return;
    }
    for (const place of places()) place.removeAttribute(MARK);
    setTimeout(() => { for (const place of places()) place.setAttribute(MARK, "true"); });
  }, { signal });
}
