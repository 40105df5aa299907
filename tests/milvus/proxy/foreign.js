// Reads what to do from standard input, does it with the Node SDK, and writes what came of it to standard output.
const { MilvusClient } = require("@zilliz/milvus2-sdk-node");

async function main({ address, collection, rows, query }) {
  const client = new MilvusClient({ address });
  await client.connectPromise;
  const described = await client.describeCollection({ collection_name: collection });
  const inserted = await client.insert({ collection_name: collection, data: rows });
  const asked = { collection_name: collection, data: query, limit: 8, output_fields: ["*"], consistency_level: "Strong" };
  const found = await client.search(asked);
  const raw = await client.search({ ...asked, params: { hubness_strength: 0 } });
  const read = await client.query({
    collection_name: collection,
    filter: `id == ${rows[0].id}`,
    output_fields: ["vector", "group"],
    consistency_level: "Strong",
  });
  const refused = await client.insert({ collection_name: collection, data: [{ ...rows[0], vector: query.map(() => 0) }] });
  await client.closeConnection();
  const vector = described.schema.fields.find((field) => field.name === "vector");
  return {
    fields: described.schema.fields.map((field) => field.name),
    dim: Number(vector.dim ?? vector.type_params.find((pair) => pair.key === "dim").value),
    inserted: Number(inserted.insert_cnt),
    found: found.results,
    raw: raw.results,
    read: read.data,
    refused: refused.status,
  };
}

let input = "";
process.stdin.on("data", (piece) => (input += piece));
process.stdin.on("end", () =>
  main(JSON.parse(input)).then(
    (told) => process.stdout.write(JSON.stringify(told)),
    (error) => {
      process.stderr.write(String(error.stack));
      process.exit(1);
    },
  ),
);
