// OpenAI's client for Node: chats and the Responses API. The same scenarios as use_openai.py.

import assert from "node:assert/strict";
import { createRequire } from "node:module";

// Packages are in the folder where this is run, not beside this file.
const installed = createRequire(`${process.cwd()}/`);
const OpenAI = installed("openai");
const { zodResponseFormat, zodTextFormat } = installed("openai/helpers/zod");
const { z } = installed("zod");

const model = process.env.LORAPLEX_MODEL;
const client = new OpenAI({ baseURL: `${process.env.LORAPLEX_URL}/v1`, apiKey: "none", maxRetries: 0 });

const question = "What is the weather?";
const tooLong = "word ".repeat(10_000);
const messages = [{ role: "user", content: question }];
const Weather = z.strictObject({
  city: z.enum(["Oslo", "Paris"]),
  days: z.union([z.literal(1), z.literal(2), z.literal(3)]),
});
const tool = { name: "weather", description: "Forecast of a city", parameters: z.toJSONSchema(Weather), strict: true };

function checkStream(parts, whole) {
  assert(whole);
  assert.equal(parts.join(""), whole);
}

async function stream() {
  const chat = { model, messages, temperature: 0, max_tokens: 20 };
  const whole = await client.chat.completions.create(chat);
  const parts = [];
  for await (const chunk of await client.chat.completions.create({ ...chat, stream: true })) {
    parts.push(chunk.choices[0]?.delta.content ?? "");
  }
  checkStream(parts, whole.choices[0].message.content);
  assert.equal(await client.chat.completions.stream(chat).finalContent(), whole.choices[0].message.content);
}

async function tools() {
  const chat = { model, tools: [{ type: "function", function: tool }], temperature: 0 };
  const choice = { type: "function", function: { name: tool.name } };
  const called = await client.chat.completions.create({ ...chat, messages, tool_choice: choice });
  const { message, finish_reason } = called.choices[0];
  assert.equal(finish_reason, "tool_calls");
  Weather.parse(JSON.parse(message.tool_calls[0].function.arguments));
  const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "rain" };
  const answer = await client.chat.completions.create({ ...chat, messages: [...messages, message, result], max_tokens: 20 });
  assert(answer.choices[0].message.content);
}

async function schema() {
  const form = zodResponseFormat(Weather, "weather");
  const answer = await client.chat.completions.parse({ model, messages, response_format: form, temperature: 0 });
  Weather.parse(answer.choices[0].message.parsed);
}

async function overflow() {
  const asked = client.chat.completions.create({ model, messages: [{ role: "user", content: tooLong }] });
  await assert.rejects(asked, (error) => {
    assert(error instanceof OpenAI.BadRequestError);
    assert.equal(error.code, "context_length_exceeded");
    assert.match(error.message, /maximum context length/);
    return true;
  });
}

async function responses_stream() {
  const asked = { model, input: question, temperature: 0, max_output_tokens: 20 };
  const whole = await client.responses.create(asked);
  const parts = [];
  for await (const event of client.responses.stream(asked)) {
    if (event.type === "response.output_text.delta") parts.push(event.delta);
  }
  checkStream(parts, whole.output_text);
  const second = await client.responses.create({ ...asked, previous_response_id: whole.id });
  assert(second.output_text);
  assert(second.usage.input_tokens > whole.usage.input_tokens);
}

async function responses_tools() {
  const asked = { model, tools: [{ type: "function", ...tool }], temperature: 0 };
  const choice = { type: "function", name: tool.name };
  const events = client.responses.stream({ ...asked, input: question, tool_choice: choice });
  let args = "";
  for await (const event of events) {
    if (event.type === "response.function_call_arguments.delta") args += event.delta;
  }
  const called = await events.finalResponse();
  const [call] = called.output.filter((item) => item.type === "function_call");
  Weather.parse(JSON.parse(call.arguments));
  assert.equal(args, call.arguments);
  const result = { type: "function_call_output", call_id: call.call_id, output: "rain" };
  const byId = await client.responses.create({
    ...asked, input: [result], previous_response_id: called.id, max_output_tokens: 20,
  });
  const items = [{ role: "user", content: question }, ...called.output, result];
  const byItems = await client.responses.create({ ...asked, input: items, max_output_tokens: 20 });
  assert(byId.output_text);
  assert.equal(byId.output_text, byItems.output_text);
}

async function responses_schema() {
  const text = { format: zodTextFormat(Weather, "weather") };
  const answer = await client.responses.parse({ model, input: question, text, temperature: 0 });
  Weather.parse(answer.output_parsed);
}

for (const scenario of [stream, tools, schema, overflow, responses_stream, responses_tools, responses_schema]) {
  let why = "";
  try {
    await scenario();
  } catch (error) {
    console.error(error);
    why = `${error.name}: ${error.message}`;
  }
  console.log(JSON.stringify({ scenario: scenario.name, ok: !why, why }));
}
