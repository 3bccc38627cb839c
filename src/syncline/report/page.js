"use strict";
(() => {
  // One box that says what a mark says; without a script, marks have titles.
  const tip = document.getElementById("tip");
  const said = new Map();
  for (const mark of document.querySelectorAll(".mark")) {
    const title = mark.querySelector(":scope > title");
    const says = title ? title.textContent : mark.getAttribute("title") || "";
    if (title) title.remove();
    mark.removeAttribute("title");
    mark.setAttribute("aria-label", says);
    said.set(mark, says);
  }

  let shown = null;
  const hide = () => { tip.hidden = true; shown = null; };
  const show = (mark) => {
    const at = mark.getBoundingClientRect();
    if (at.bottom < 0 || at.top > innerHeight) { tip.hidden = true; return; }
    shown = mark;
    tip.textContent = said.get(mark);
    tip.hidden = false;
    const middle = Math.min(Math.max(at.left + at.width / 2, 0), innerWidth);
    const left = Math.min(Math.max(middle - tip.offsetWidth / 2, 8), innerWidth - tip.offsetWidth - 8);
    const above = at.top - tip.offsetHeight - 8;
    tip.style.left = `${left}px`;
    tip.style.top = `${above > 8 ? above : at.bottom + 8}px`;
  };
  const markOf = (target) => (target instanceof Element ? target.closest(".mark") : null);

  document.addEventListener("pointerover", (event) => {
    const mark = markOf(event.target);
    if (mark) show(mark);
    else if (!markOf(document.activeElement)) hide();
  });
  document.addEventListener("focusin", (event) => {
    const mark = markOf(event.target);
    if (mark) show(mark);
    else hide();
  });
  document.addEventListener("focusout", hide);
  for (const moved of ["scroll", "resize"]) {
    addEventListener(moved, () => { if (shown) show(shown); }, { passive: true, capture: true });
  }

  // Tab goes from chart to chart; arrows, Home and End go from mark to mark.
  const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity };
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hide();
    const mark = markOf(document.activeElement);
    if (!mark || !(event.key in steps)) return;
    const marks = [...mark.closest(".chart").querySelectorAll(".mark")];
    const place = Math.min(Math.max(marks.indexOf(mark) + steps[event.key], 0), marks.length - 1);
    event.preventDefault();
    mark.tabIndex = -1;
    marks[place].tabIndex = 0;
    marks[place].focus();
  });
})();
