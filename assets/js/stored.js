// What this browser keeps, in localStorage or sessionStorage. One that keeps nothing goes on without.
function store(place, key, value) {
  try {
    window[place].setItem(key, value);
  } catch {
    // it is switched off, or full
  }
}

const stored = window.medusaKept; // first.js
