// Tables that scroll can be reached by the keyboard.
document$.subscribe(() =>
  requestAnimationFrame(() => {
    for (const table of document.querySelectorAll(".md-typeset__scrollwrap")) table.tabIndex = 0;
  }),
);
