//! Trust anchor, issuer and join tokens of one run.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use tulle_control::trust::{self, CertificateAuthority, TokenSubject};

use super::process::{CONTROL_UID, PROXY_UID};
use super::rundir;
use super::topology::{Topology, Workload};

/// The directory of keys, certificates and tokens.
pub(super) struct Credentials {
    dir: PathBuf,
    anchor: CertificateAuthority,
}

impl Credentials {
    /// Creates all credentials. The issuer's key and the join tokens are readable only by the user whose processes need them.
    pub(super) fn create(dir: &Path, topology: &Topology) -> anyhow::Result<Self> {
        let name = format!("root.linkerd.{}", topology.trust_domain);
        let anchor = trust::create_anchor(&name, trust::ANCHOR_LIFETIME).context("creating the trust anchor")?;
        let credentials = Self {
            dir: dir.to_owned(),
            anchor,
        };
        fs::write(credentials.anchors(), &credentials.anchor.certificate).context("writing the trust anchor")?;
        rundir::create_public_directory(&credentials.issuer())?;
        rundir::create_public_directory(&credentials.token_keys())?;
        credentials.rotate_issuer(topology)?;
        let keys = trust::create_token_keys().context("creating the keys of join tokens")?;
        fs::write(credentials.token_keys().join("demo.pem"), &keys.public).context("writing the token key")?;
        for workload in &topology.workloads {
            let subject = TokenSubject {
                service_account: &workload.service_account,
                namespace: &workload.namespace,
                lifetime: trust::TOKEN_LIFETIME,
            };
            let token = trust::create_token(&keys.private, &subject)
                .with_context(|| format!("creating the join token of {}", workload.name))?;
            let path = credentials.token(workload);
            trust::write_secret(&path, &token).context("writing a join token")?;
            rundir::give_to_user(&path, PROXY_UID)?;
        }
        Ok(credentials)
    }

    /// Replaces the issuer by a new one.
    pub(super) fn rotate_issuer(&self, topology: &Topology) -> anyhow::Result<()> {
        let name = format!("identity.linkerd.{}", topology.trust_domain);
        let issuer =
            trust::create_issuer(&name, trust::ISSUER_LIFETIME, &self.anchor).context("creating the issuer")?;
        let new = |file: &str| self.dir.join(format!("new-{file}"));
        issuer
            .write(&new(CERTIFICATE), &new(KEY))
            .context("writing the issuer")?;
        for file in [KEY, CERTIFICATE] {
            rundir::give_to_user(&new(file), CONTROL_UID)?;
            // Renamed into place, so that readers never see a partial file.
            fs::rename(new(file), self.issuer().join(file))
                .with_context(|| format!("replacing the issuer's {file}"))?;
        }
        Ok(())
    }

    pub(super) fn anchors(&self) -> PathBuf {
        self.dir.join("ca.crt")
    }

    /// The trust anchors as a PEM bundle for sidecars.
    pub(super) fn anchors_pem(&self) -> &str {
        &self.anchor.certificate
    }

    pub(super) fn issuer(&self) -> PathBuf {
        self.dir.join("issuer")
    }

    pub(super) fn token_keys(&self) -> PathBuf {
        self.dir.join("token-keys")
    }

    pub(super) fn token(&self, workload: &Workload) -> PathBuf {
        self.dir.join(format!("{}.token", workload.name))
    }
}

const CERTIFICATE: &str = "crt.pem";
const KEY: &str = "key.pem";
