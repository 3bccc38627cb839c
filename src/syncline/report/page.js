"use strict";
(() => {
  // One tooltip for all marks. Without this script, browsers show the marks' titles.
  const tip = document.getElementById("tip");
  const tooltips = new Map();
  for (const mark of document.querySelectorAll(".mark")) {
    const title = mark.querySelector(":scope > title");
    const text = title ? title.textContent : mark.getAttribute("title") || "";
    if (title) title.remove();
    mark.removeAttribute("title");
    mark.setAttribute("aria-label", text);
    mark.setAttribute("role", "img");
    mark.tabIndex = -1;
    tooltips.set(mark, text);
  }

  let shown = null;
  const hide = () => { tip.hidden = true; shown = null; };
  const show = (mark) => {
    const at = mark.getBoundingClientRect();
    if (at.bottom < 0 || at.top > innerHeight) { tip.hidden = true; return; }
    shown = mark;
    tip.textContent = tooltips.get(mark);
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

  // Tab moves from chart to chart; arrow keys, Home and End move from mark to mark.
  for (const chart of document.querySelectorAll(".chart")) {
    const first = chart.querySelector(".mark");
    if (first) first.tabIndex = 0;
  }
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
