//! `tulle trust`: creates credentials for a mesh without another certificate authority.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::{Args, Subcommand};
use tulle_control::trust::{self, CertificateAuthority, TokenSubject};
use tulle_core::duration;

#[cfg(target_os = "linux")]
use crate::workload_api;

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Command {
    /// Create a trust anchor: the root certificate that all members of the mesh trust
    #[command(name = "create-anchor")]
    Anchor(Anchor),
    /// Create an issuer, signed by a trust anchor, with which the identity service signs certificates
    #[command(name = "create-issuer")]
    Issuer(Issuer),
    /// Create a join token, with which a workload proves its identity
    #[command(name = "create-token")]
    Token(Token),
    /// Serve the SPIFFE Workload API to a sidecar on this machine, as a replacement for SPIRE
    #[cfg(target_os = "linux")]
    #[command(name = "serve-workload-api")]
    WorkloadApi(workload_api::Args),
}

#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Anchor {
    /// The common name of the certificate
    #[arg(long, default_value = "root.linkerd.cluster.local")]
    common_name: String,
    /// Where to write the certificate; readable by all users
    #[arg(long, value_name = "FILE", default_value = "ca.crt")]
    cert: PathBuf,
    /// Where to write the private key; readable by you only, keep it away from the mesh
    #[arg(long, value_name = "FILE", default_value = "ca.key")]
    key: PathBuf,
    /// The lifetime of the certificate, such as 3650d
    #[arg(long, value_name = "DURATION", default_value = "3650d", value_parser = duration::parse_lifetime)]
    lifetime: Duration,
}

#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Issuer {
    /// The common name of the certificate
    #[arg(long, default_value = "identity.linkerd.cluster.local")]
    common_name: String,
    /// Limit the issuer to certificates of this SPIFFE identity, for one workload outside of clusters, such as
    /// spiffe://root.linkerd.cluster.local/vm
    #[arg(long, value_name = "URI", conflicts_with = "common_name")]
    identity: Option<String>,
    /// The trust anchor's certificate
    #[arg(long, value_name = "FILE", default_value = "ca.crt")]
    anchor_cert: PathBuf,
    /// The trust anchor's private key
    #[arg(long, value_name = "FILE", default_value = "ca.key")]
    anchor_key: PathBuf,
    /// The directory for crt.pem and key.pem; created if it does not exist
    #[arg(long, value_name = "DIR", default_value = "issuer")]
    dir: PathBuf,
    /// The lifetime of the certificate, limited by that of the trust anchor
    #[arg(long, value_name = "DURATION", default_value = "365d", value_parser = duration::parse_lifetime)]
    lifetime: Duration,
}

#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Token {
    /// The workload's service account
    #[arg(long, value_name = "NAME")]
    service_account: String,
    /// The workload's namespace
    #[arg(long, value_name = "NAME", default_value = "default")]
    namespace: String,
    /// The private key that signs tokens; created if it does not exist, with its public key in --public-key
    #[arg(long, value_name = "FILE", default_value = "token.key")]
    key: PathBuf,
    /// Where to write the public key if --key is created. Give the directory of this file to the control plane as --token-keys: it
    /// reads all keys in it
    #[arg(long, value_name = "FILE", default_value = "token-keys/token.pem")]
    public_key: PathBuf,
    /// Where to write the token; readable by you only
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// The lifetime of the token; sidecars read the file again for every certificate
    #[arg(long, value_name = "DURATION", default_value = "1d", value_parser = duration::parse_lifetime)]
    lifetime: Duration,
}

/// Creates the requested credentials, and prints where they are.
pub(crate) fn main(command: &Command) -> anyhow::Result<()> {
    match command {
        Command::Anchor(args) => create_anchor(args),
        Command::Issuer(args) => create_issuer(args),
        Command::Token(args) => create_token(args),
        #[cfg(target_os = "linux")]
        Command::WorkloadApi(args) => workload_api::main(args),
    }
}

fn create_anchor(args: &Anchor) -> anyhow::Result<()> {
    trust::create_anchor(&args.common_name, args.lifetime)?.write(&args.cert, &args.key)?;
    println!("{}  trust anchor, for all members of the mesh", args.cert.display());
    println!("{}  its private key, needed only to create issuers", args.key.display());
    Ok(())
}

fn create_issuer(args: &Issuer) -> anyhow::Result<()> {
    let anchor = CertificateAuthority::read(&args.anchor_cert, &args.anchor_key)?;
    let issuer = match &args.identity {
        Some(identity) => trust::create_single_identity_issuer(identity, args.lifetime, &anchor)?,
        None => trust::create_issuer(&args.common_name, args.lifetime, &anchor)?,
    };
    create_directory(&args.dir)?;
    let (cert, key) = (args.dir.join("crt.pem"), args.dir.join("key.pem"));
    issuer.write(&cert, &key)?;
    let owner = args.identity.as_deref().unwrap_or("the control plane");
    println!(
        "{}  issuer for {owner}, with its private key in the same directory",
        cert.display()
    );
    Ok(())
}

fn create_token(args: &Token) -> anyhow::Result<()> {
    // This check is first, so that no keys are created if the token cannot be written.
    ensure!(
        !args.out.exists(),
        "{:?} exists already, and credentials are never overwritten",
        args.out
    );
    let subject = TokenSubject {
        service_account: &args.service_account,
        namespace: &args.namespace,
        lifetime: args.lifetime,
    };
    if args.key.exists() {
        let key = fs::read_to_string(&args.key).with_context(|| format!("reading {:?}", args.key))?;
        trust::write_secret(&args.out, &trust::create_token(&key, &subject)?)?;
    } else {
        let keys = trust::create_token_keys()?;
        let token = trust::create_token(&keys.private, &subject)?;
        if let Some(dir) = args.public_key.parent() {
            create_directory(dir)?;
        }
        keys.write(&args.public_key, &args.key)?;
        println!(
            "{}  public key, for the control plane's --token-keys",
            args.public_key.display()
        );
        println!(
            "{}  private key, which signs tokens for any workload; keep it secret",
            args.key.display()
        );
        trust::write_secret(&args.out, &token)?;
    }
    println!(
        "{}  join token of {} in {}",
        args.out.display(),
        args.service_account,
        args.namespace
    );
    Ok(())
}

fn create_directory(dir: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(dir).with_context(|| format!("creating the directory {dir:?}"))
}

const EXAMPLES: &str = "\
A mesh without Kubernetes needs one trust anchor, one issuer, and a token for each workload:

  tulle trust create-anchor
  tulle trust create-issuer
  tulle trust create-token --service-account web --namespace shop --out web.token
  tulle trust create-token --service-account db  --namespace shop --out db.token

  tulle-control all-in-one --manifests ./manifests \\
      --trust-anchors ca.crt --issuer ./issuer --token-keys ./token-keys

The sidecar of `web` then gets ca.crt in LINKERD2_PROXY_IDENTITY_TRUST_ANCHORS and the path of web.token in
LINKERD2_PROXY_IDENTITY_TOKEN_FILE, and has the identity web.shop.serviceaccount.identity.linkerd.cluster.local.
To rotate the issuer, create a new one elsewhere and move its two files over the old ones; no restart is needed.
Existing files are never overwritten.";

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(subcommand)]
        command: Command,
    }

    fn run(line: &str, dir: &Path) -> anyhow::Result<()> {
        let line = line.replace("DIR", &dir.display().to_string());
        main(
            &Line::try_parse_from(std::iter::once("trust").chain(line.split(' ')))
                .unwrap()
                .command,
        )
    }

    const ANCHOR: &str = "create-anchor --cert DIR/ca.crt --key DIR/ca.key";
    const ISSUER: &str = "create-issuer --anchor-cert DIR/ca.crt --anchor-key DIR/ca.key --dir DIR/issuer";
    const TOKEN: &str = "create-token --service-account web --namespace shop --key DIR/token.key \
                         --public-key DIR/keys/token.pem --out DIR/web.token";

    #[test]
    fn a_complete_set_of_credentials_is_created_and_secrets_are_readable_by_their_owner_only() {
        let dir = tempfile::tempdir().unwrap();
        for line in [ANCHOR, ISSUER, TOKEN] {
            run(line, dir.path()).unwrap();
        }
        for secret in ["ca.key", "issuer/key.pem", "token.key", "web.token"] {
            let mode = fs::metadata(dir.path().join(secret)).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{secret}");
        }
        // The second token is signed by the same key.
        let public = fs::read(dir.path().join("keys/token.pem")).unwrap();
        run(&TOKEN.replace("web.token", "db.token"), dir.path()).unwrap();
        assert_eq!(fs::read(dir.path().join("keys/token.pem")).unwrap(), public);
    }

    #[test]
    fn existing_files_are_not_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        for line in [ANCHOR, ISSUER, TOKEN] {
            run(line, dir.path()).unwrap();
            let error = format!("{:#}", run(line, dir.path()).unwrap_err());
            assert!(error.contains("exists already"), "{error}");
        }
    }

    #[test]
    fn an_issuer_requires_an_anchor() {
        let dir = tempfile::tempdir().unwrap();
        let error = format!("{:#}", run(ISSUER, dir.path()).unwrap_err());
        assert!(error.contains("ca.crt"), "{error}");
        assert!(!dir.path().join("issuer").exists());
    }
}
