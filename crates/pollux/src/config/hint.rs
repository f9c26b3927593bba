//! What to type so that a guest meets a port.

use pollux_vhost::{PortConfig, SocketMode};

/// Lines for an operator: the socket, and the exact options of QEMU and of
/// testpmd for it.
pub(crate) fn connect_hint(port: &str, config: &PortConfig) -> String {
    let path = config.socket.display();
    // QEMU ends a value at a comma, and reads two as one.
    let qemu_path = path.to_string().replace(',', ",,");
    let (does, qemu_side, testpmd_side) = match config.mode {
        SocketMode::Server => ("listens on", "", ""),
        SocketMode::Client => ("connects to", ",server=on", ",server=1"),
    };
    format!(
        "port {port} {does} {path}
  QEMU:    -chardev socket,id={port},path={qemu_path}{qemu_side} \
         -netdev vhost-user,id={port}-net,chardev={port} -device virtio-net-pci,netdev={port}-net
  testpmd: --vdev=net_virtio_user0,path={path}{testpmd_side},queue_size=1024
"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guest_takes_the_other_side() {
        let mut config = PortConfig {
            socket: "/run/pollux/vm1.sock".into(),
            mode: SocketMode::Server,
            any_memory: false,
        };
        assert_eq!(
            connect_hint("vm1", &config),
            "\
port vm1 listens on /run/pollux/vm1.sock
  QEMU:    -chardev socket,id=vm1,path=/run/pollux/vm1.sock -netdev vhost-user,id=vm1-net,chardev=vm1 -device virtio-net-pci,netdev=vm1-net
  testpmd: --vdev=net_virtio_user0,path=/run/pollux/vm1.sock,queue_size=1024
"
        );
        config.mode = SocketMode::Client;
        let hint = connect_hint("vm1", &config);
        assert!(hint.contains("connects to /run/pollux/vm1.sock\n"));
        assert!(hint.contains("vm1.sock,server=on -netdev"));
        assert!(hint.contains("vm1.sock,server=1,queue_size"));
    }
}
