// What this browser keeps, in localStorage or sessionStorage. One that keeps nothing goes on without.
export function store(place, key, value) {
  try {
    window[place].setItem(key, value);
  } catch {
    // it is switched off, or full
  }
}

export function stored(place, key) {
  try {
    return window[place].getItem(key);
  } catch {
    return null;
  }
}
