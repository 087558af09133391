// Runs npm's oidc-provider, an OpenID-certified provider, at a port: node certified_provider.mjs FOLDER PAGE
// FOLDER has its node_modules. PKCE is required, refresh tokens rotate, and its own forms sign people in.

import { createServer } from "node:http";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [folder, page] = process.argv.slice(2);
const found = createRequire(`${folder}/package.json`).resolve("oidc-provider");
const { Provider } = await import(pathToFileURL(found));
const server = createServer().listen(0, "127.0.0.1", () => {
  const issuer = `http://127.0.0.1:${server.address().port}`;
  const provider = new Provider(issuer, {
    clients: [{
      client_id: "the page",
      client_secret: "a secret: with signs",
      redirect_uris: [`${page}session/callback`],
      post_logout_redirect_uris: [page],
      grant_types: ["authorization_code", "refresh_token"],
    }],
    claims: { openid: ["sub"], groups: ["realm"] },
    conformIdTokenClaims: false,
    findAccount: (_, id) => ({ accountId: id, claims: () => ({ sub: id, realm: { groups: [`${id}-staff`] } }) }),
    issueRefreshToken: () => true,
    pkce: { required: () => true },
    rotateRefreshToken: true,
  });
  server.on("request", provider.callback());
  console.log(issuer);
});
