// SPDX-License-Identifier: Apache-2.0
// OpenAI's npm package: prints what came back as one line of JSON. Argument: the gateway's address.

import { createRequire } from "node:module";

const OpenAI = createRequire(`${process.cwd()}/`)("openai").default;
const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Hello!" }];
const greedy = { model: "demo", messages, max_tokens: 8, temperature: 0 };
const schema = {
  type: "object",
  properties: { yes: { type: "boolean" } },
  required: ["yes"],
  additionalProperties: false,
};
const tool = { type: "function", function: { name: "look_up", description: "Look up a word.", parameters: schema } };
const found = { models: (await client.models.list()).data.map((model) => model.id) };

const chat = await client.chat.completions.create(greedy);
found.chat = chat.choices[0].message.content;

const pieces = [];
for await (const chunk of await client.chat.completions.create({ ...greedy, stream: true })) {
  pieces.push(chunk.choices[0]?.delta?.content ?? "");
}
found.stream = pieces.join("");

const runner = client.chat.completions.stream(greedy);
found.helper = (await runner.finalChatCompletion()).choices[0].message.content;

const structured = await client.chat.completions.parse({
  model: "tiny",
  messages,
  max_tokens: 200,
  response_format: { type: "json_schema", json_schema: { name: "answer", strict: true, schema } },
});
found.structured = JSON.parse(structured.choices[0].message.content);

const called = await client.chat.completions.create({
  model: "tiny",
  messages,
  max_tokens: 200,
  tools: [tool],
  tool_choice: { type: "function", function: { name: "look_up" } },
});
const { name, arguments: text } = called.choices[0].message.tool_calls[0].function;
found.tool = { name, arguments: JSON.parse(text) };

try {
  await client.chat.completions.create({ ...greedy, model: "nobody" });
} catch (error) {
  found.error = { type: error.constructor.name, status: error.status, code: error.code, text: error.message };
}
console.log(JSON.stringify(found));
