//! Admin commands that pass to a drive.

use std::sync::Arc;

use rdmux_wire::nvme::{FabricsType, IDENTIFY_LEN, Sqe, Status};

use super::Controller;
use crate::passthrough::{Kind, Own};
use crate::target::association::Session;
use crate::target::io::Io;
use crate::target::namespace::{Seat, User};

impl Controller {
    /// Returns an admin command that passes to a drive; `None`: it is the target's.
    pub(in crate::target) fn check_passed(
        &self,
        sqe: &Sqe,
        of_fabrics: Option<FabricsType>,
        data_len: u32,
    ) -> Result<Option<Io>, Status> {
        let Some(drive) = self.subsystem.drive().filter(|_| of_fabrics.is_none()) else {
            return Ok(None);
        };
        let Some(pass) = drive.controller.check_admin(sqe, data_len)? else {
            return Ok(None);
        };
        let namespace = self.known.1.get(&sqe.nsid());
        let own = Own {
            controller: (pass.kind == Kind::IdentifyController).then(|| {
                let mut bytes = vec![0; IDENTIFY_LEN];
                self.identify_controller().emit(&mut bytes);
                bytes.into()
            }),
            ana_group: namespace.map_or(0, |namespace| namespace.ana_group()),
        };
        let user = User {
            subsystem: self.subsystem.clone(),
            session: Session::new(self.association.clone(), 0),
            qid: 0,
            local: self.local,
        };
        let seat = Arc::new(Seat::new(drive.admin.clone(), Some(user)));
        Ok(Some(Io::passed(seat, pass, sqe, Some(own), data_len)))
    }
}
