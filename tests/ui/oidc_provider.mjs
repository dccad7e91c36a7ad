// A certified OpenID Connect provider. Arguments: issuer, port, and the client and the groups of each person as JSON.
// Its development pages accept every password.
import Provider from "oidc-provider";

const [issuer, port, given] = process.argv.slice(2);
const { client, groups, audience } = JSON.parse(given);

const provider = new Provider(issuer, {
  clients: [client],
  claims: { openid: ["sub"], profile: ["preferred_username", "groups"] },
  pkce: { required: () => true },
  findAccount: (_, id) => ({
    accountId: id,
    claims: () => ({ sub: id, preferred_username: `${id}@example.com`, groups: groups[id] ?? [] }),
  }),
  extraTokenClaims: (_, token) => ({ groups: groups[token.accountId ?? token.clientId] ?? [] }),
  features: {
    clientCredentials: { enabled: true },
    resourceIndicators: {
      enabled: true,
      getResourceServerInfo: () => ({ audience, scope: "", accessTokenFormat: "jwt" }),
    },
  },
  cookies: { keys: ["a key of the tests"] },
});
provider.proxy = true; // X-Forwarded-Proto says that the browser uses https
provider.listen(Number(port), "127.0.0.1", () => console.log("ready"));
