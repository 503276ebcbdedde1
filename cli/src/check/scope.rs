/// The checks to run, and the namespaces that they cover.
#[derive(Clone, Debug)]
pub(super) struct Scope {
    pub(super) mode: Mode,
    pub(super) control_plane_namespace: String,
    /// The namespace whose proxies are checked; all namespaces if absent.
    pub(super) namespace: Option<String>,
    pub(super) expected_version: Option<String>,
    pub(super) cni_namespace: String,
    /// Whether the CNI plugin is checked even if the control plane is not configured for it.
    pub(super) check_cni: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    Pre,
    Crds,
    /// Only whether the control plane is available.
    ControlPlane,
    Installed,
    Proxy,
}

impl Scope {
    /// A `tulle` command line with the flags for this control plane.
    pub(super) fn tulle_command(&self, command: &str) -> String {
        match self.control_plane_namespace.as_str() {
            "linkerd" => format!("tulle {command}"),
            other => format!("tulle {command} -L {other}"),
        }
    }

    pub(super) fn install_command(&self) -> String {
        let install = self.tulle_command("install");
        format!("{install} --crds | kubectl apply -f - && {install} | kubectl apply -f -")
    }

    pub(super) fn upgrade_command(&self) -> String {
        format!(
            "{} | kubectl apply -f - (or `helm upgrade`, if Helm installed it)",
            self.tulle_command("upgrade")
        )
    }
}
