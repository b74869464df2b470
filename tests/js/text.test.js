// The text of an answer against what is drawn of it.
import assert from "node:assert/strict";
import { test } from "node:test";
import { align } from "../../assets/js/align.js";
import { wordsOfCount } from "../../assets/js/format.js";

function drawn(...texts) {
  return texts.map((data) => ({ data }));
}

test("markup is no matter", () => {
  const pieces = [2, "**Bo", 1, "ld** t", 3, "ext"];
  assert.deepEqual(align(drawn("Bold", " text"), pieces), [2, 2, 1, 1, 1, 3, 3, 3]);
});

test("what is drawn and stands nowhere in the text has no tokens", () => {
  assert.deepEqual(align(drawn("1.", "ab"), [1, "ab"]).slice(-2), [1, 1]);
});

test("a link's address and a fence's language are not drawn", () => {
  assert.deepEqual(align(drawn("see", "this"), [1, "see [th", 2, "is](http://a.b/c)"]), [1, 1, 1, 1, 1, 2, 2]);
  assert.deepEqual(align(drawn("x=1"), [4, "```py\nx=1\n```"]), [4, 4, 4]);
});

test("a message is counted in tokens, against what is left after it", () => {
  assert.equal(wordsOfCount(1, 1996), "1 token, 1,996 left");
  assert.equal(wordsOfCount(2400, -404), "2,400 tokens, 404 too many");
});
