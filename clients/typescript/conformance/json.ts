// Protobuf's exact JSON mapping, between JSON and the objects of the generated code.
//
// The generated toJSON and fromJSON differ from it. There a Duration is an object, a 64-bit integer is a number, and an
// unknown enum value is lost. So types are looked up in the schema, as the compiler wrote it.

import { readFileSync } from "node:fs";
import { durationFromJson, durationToJson, type Duration } from "kvgrpc";

interface Field {
  name: string;
  jsonName: string;
  type: string;
  typeName?: string;
  label: string;
  oneofIndex?: number;
}
interface Message {
  name: string;
  field?: Field[];
  nestedType?: Message[];
  options?: { mapEntry?: boolean };
}
interface Enum {
  name: string;
  value: { name: string; number?: number }[];
}
interface Schema {
  file: { package: string; messageType?: Message[]; enumType?: Enum[] }[];
}
type Object_ = Record<string, unknown>;

const DURATION = ".google.protobuf.Duration";
const LONG = new Set(["TYPE_INT64", "TYPE_UINT64", "TYPE_SINT64", "TYPE_FIXED64", "TYPE_SFIXED64"]);
const LARGEST = 2 ** 64 - 2 ** 11;
const messages = new Map<string, Message>();
const enums = new Map<string, Enum>();

/** The schema is beside the generated code, which is two folders up from the compiled executor. */
const schema = JSON.parse(readFileSync(new URL("../../gen/schema.json", import.meta.url), "utf8")) as Schema;
for (const file of schema.file) {
  for (const message of file.messageType ?? []) add(`.${file.package}`, message);
  for (const values of file.enumType ?? []) enums.set(`.${file.package}.${values.name}`, values);
}

function add(scope: string, message: Message): void {
  const name = `${scope}.${message.name}`;
  messages.set(name, message);
  for (const nested of message.nestedType ?? []) add(name, nested);
}

/** Returns a message of the generated code as JSON. Fields that are not set are left out. */
export function toJson(type: string, message: object): Object_ {
  const json: Object_ = {};
  for (const field of fieldsOf(type)) {
    const value = (message as Object_)[field.jsonName];
    if (value === undefined) continue;
    const entry = mapEntry(field);
    if (entry) {
      const rows = Object.entries(value as Object_);
      if (rows.length > 0) json[field.jsonName] = Object.fromEntries(rows.map(([k, v]) => [k, valueToJson(entry, v)]));
    } else if (isRepeated(field)) {
      const items = value as unknown[];
      if (items.length > 0) json[field.jsonName] = items.map((item) => valueToJson(field, item));
    } else if (field.oneofIndex !== undefined || !isDefault(value)) {
      json[field.jsonName] = valueToJson(field, value);
    }
  }
  return json;
}

/** Returns JSON as fromPartial of the generated code takes it. Throws on names that the message does not have. */
export function fromJson(type: string, json: object): Object_ {
  const message: Object_ = {};
  const fields = new Map(fieldsOf(type).flatMap((field) => [[field.jsonName, field], [field.name, field]]));
  for (const [name, value] of Object.entries(json)) {
    const field = fields.get(name);
    if (!field) throw new TypeError(`${type} has no field ${name}`);
    if (value === null) continue;
    const entry = mapEntry(field);
    if (entry) {
      const rows = Object.entries(value as Object_).map(([k, v]) => [k, valueFromJson(entry, v)]);
      message[field.jsonName] = Object.fromEntries(rows);
    } else if (isRepeated(field)) {
      message[field.jsonName] = (value as unknown[]).map((item) => valueFromJson(field, item));
    } else {
      message[field.jsonName] = valueFromJson(field, value);
    }
  }
  return message;
}

function valueToJson(field: Field, value: unknown): unknown {
  if (field.typeName === DURATION) return durationToJson(value as Duration);
  if (field.type === "TYPE_MESSAGE") return toJson(field.typeName!, value as object);
  if (field.type === "TYPE_ENUM") return valuesOf(field).find((row) => (row.number ?? 0) === value)?.name ?? value;
  if (field.type === "TYPE_BYTES") return Buffer.from(value as Uint8Array).toString("base64");
  if (LONG.has(field.type)) return String(value);
  return value;
}

function valueFromJson(field: Field, value: unknown): unknown {
  if (field.typeName === DURATION) return durationFromJson(value);
  if (field.type === "TYPE_MESSAGE") return fromJson(field.typeName!, value as object);
  if (field.type === "TYPE_ENUM") return typeof value === "string" ? numberOf(field, value) : value;
  if (field.type === "TYPE_BYTES") return new Uint8Array(Buffer.from(value as string, "base64"));
  if (field.type === "TYPE_STRING" || field.type === "TYPE_BOOL") return value;
  // A number cannot hold the largest integers of 64 bits. The largest one below stands for them.
  return Math.min(Number(value), LARGEST);
}

function numberOf(field: Field, name: string): number {
  const found = valuesOf(field).find((row) => row.name === name);
  if (!found) throw new TypeError(`${field.typeName} has no value ${name}`);
  return found.number ?? 0;
}

function fieldsOf(type: string): Field[] {
  const message = messages.get(type);
  if (!message) throw new TypeError(`there is no message ${type}`);
  return message.field ?? [];
}

function valuesOf(field: Field): Enum["value"] {
  return enums.get(field.typeName!)?.value ?? [];
}

/** Returns the value's field of a map's entry; undefined for a field that is not a map. */
function mapEntry(field: Field): Field | undefined {
  const type = field.type === "TYPE_MESSAGE" ? messages.get(field.typeName!) : undefined;
  return type?.options?.mapEntry ? type.field?.find((part) => part.name === "value") : undefined;
}

function isRepeated(field: Field): boolean {
  return field.label === "LABEL_REPEATED";
}

function isDefault(value: unknown): boolean {
  return value === 0 || value === "" || value === false || (value instanceof Uint8Array && value.length === 0);
}
