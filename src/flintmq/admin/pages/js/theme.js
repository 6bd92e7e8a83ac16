// Runs before the first paint: the theme that was chosen here before, or that of the system.
try {
  const chosen = localStorage.getItem("flintmq-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch { /* storage is switched off: the system's theme it is */ }
